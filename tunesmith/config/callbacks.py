"""Knobs of what happens between the steps of a run: callbacks, early stopping and the best checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from pydantic import Field, model_validator

from tunesmith.arguments import suggest_name
from tunesmith.config.section import Section

Mode = Literal["max", "min"]
EVAL_PREFIX = "eval/"
"""Prefix of the metrics of evaluations; the name of the held-out set follows."""


class CallbacksSection(Section):
    """Functions that are called during the run, as `module:function` or `file.py:function`."""

    on_step_end: str | None = None
    """Called after each step, when its rollouts and metrics are on disk; may return `Stop(reason=...)`."""
    on_evaluation: str | None = None
    """Called after each evaluation; may return `Stop(reason=...)`."""
    on_checkpoint: str | None = None
    """Called after each checkpoint is complete on disk; copy it elsewhere here."""


class EarlyStoppingSection(Section):
    """Ends the run once a metric no longer improves, or has reached a target."""

    metric: str
    """Metric to watch, by its name in metrics.jsonl: of an evaluation (`eval/<set>/reward`), or of a step
    (`rollout/reward_mean`)."""
    mode: Mode = "max"
    """Whether larger or smaller values are better."""
    patience: int | None = Field(default=3, ge=1)
    """Evaluations (steps for a metric of steps) in a row without improvement that end the run; null only stops at
    `target`."""
    min_delta: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Smallest difference to the best value that counts as an improvement; raise it if the metric is noisy."""
    target: float | None = Field(default=None, allow_inf_nan=False)
    """Value at which the run ends; null sets none."""
    min_steps: int = Field(default=0, ge=0)
    """Steps before which the run does not end; raise it if the metric rises late."""

    @model_validator(mode="after")
    def _check_rule(self) -> EarlyStoppingSection:
        if self.patience is None and self.target is None:
            raise ValueError("patience=null needs a target: without both the run never stops early")
        return self


class PatienceSection(Section):
    """Ends a training on rows once the evaluation loss no longer falls."""

    patience: int = Field(default=3, ge=1)
    """Evaluations in a row without improvement that end the training."""
    min_delta: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Smallest decrease of the evaluation loss that counts as an improvement."""


class KeepBestSection(Section):
    """Keeps the checkpoint with the best evaluation besides the newest ones."""

    metric: str
    """Metric of an evaluation, by its name in metrics.jsonl: `eval/<set>/reward`."""
    mode: Mode = "max"
    """Whether larger or smaller values are better."""


def check_metric_name(knob: str, metric: str, *, eval_sets: Collection[str], interval_steps: int) -> None:
    """Raise if the metric of an evaluation names no held-out set, or if evaluations take place only at the end."""
    if not metric.startswith(EVAL_PREFIX):
        if knob == "keep_best" or "/" not in metric:
            raise ValueError(f"{knob}.metric={metric!r} must be a metric of an evaluation, such as eval/<set>/reward")
        return
    named = [each for each in eval_sets if metric.startswith(f"{EVAL_PREFIX}{each}/")]
    if not named:
        found = metric.removeprefix(EVAL_PREFIX).split("/")[0]
        hint = suggest_name(found, list(eval_sets)) if eval_sets else "known: none"
        raise ValueError(f"{knob}.metric={metric!r} names no set of eval_datasets: {hint}")
    if interval_steps == 0:
        raise ValueError(f"{knob}.metric={metric!r} has no effect with evaluation.interval_steps=0: set an interval")
