"""Knobs of measuring a model on training tasks, as a stage of a pipeline."""

from __future__ import annotations

from pydantic import Field

from tunesmith.config.run import RunConfig


class PassRateConfig(RunConfig):
    """Rollouts on the training tasks without training, as `tunesmith pass-rate`."""

    field: str = "pass_rate"
    """Name of the new field with the mean outcome of a task's rollouts."""
    num_runs: int = Field(default=8, ge=1)
    """Rollouts per task."""
    max_tasks: int | None = Field(default=None, ge=1)
    """Maximum number of tasks, the first ones; null measures all."""
    tool_keys: tuple[str, ...] = ()
    """Metrics of the workflow whose sum is a rollout's number of tool calls. If set, `<field>_correctness` and
    `<field>_tool_calls` list the outcome and the tool calls of each scored rollout, for the `pareto` stage."""
