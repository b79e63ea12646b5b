"""Knobs of commands that run tasks without training: `tunesmith eval` with `models`, and pass rates as a stage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tunesmith.config.engine import EngineSection
from tunesmith.config.environment import EnvironmentSection, add_environment_tasks
from tunesmith.config.experience import ExperienceSection
from tunesmith.config.model import AuxiliaryModelSection, ModelSection, ServedModelSection
from tunesmith.config.rollout import RolloutSection
from tunesmith.config.run import DatasetSection, EvaluationSection, HeldOutSection, MonitorSection, RunConfig
from tunesmith.config.section import ROLLOUT_KNOBS, NumThreads, Section, Unused


class EvalConfig(Section):
    """Models, held-out tasks, agent and sampling of an evaluation."""

    models: dict[str, str] = Field(min_length=1)
    """Label -> model folder, hub id, adapter, or run folder (its last checkpoint), in table order; each model is
    compared with all earlier ones."""
    workflow: str | None = None
    """Agent, as `module:function` or `file.py:function`; required in files, while `evaluate()` takes the function."""
    judge: str | None = None
    """Judge, in the same form; null uses the workflow's reward."""
    environment: EnvironmentSection = EnvironmentSection()
    """Protocol, tools and limits of `tunesmith.environments:tool_agent`, and of workflows with a parameter
    `environment`; or the name of an environment, as in a run file."""
    suite: Literal["tir", "tir_paper"] | None = None
    """Judge and measures under one name. tir, for agents with tools: exact match, F1, equality of math, efficiency,
    successful execution and reasoning length, and with an auxiliary model `judge` its verdict and conciseness.
    tir_paper adds the scores of ET-Agent's own code. Replaces `judge`, and null in `workflow` is
    `tunesmith.environments:tool_agent`."""
    eval_datasets: dict[str, DatasetSection] = Field(min_length=1)
    """Held-out task sets by name."""
    model: ServedModelSection = ServedModelSection()
    """Loading and sampling of every model."""
    auxiliary_models: dict[str, AuxiliaryModelSection] = Field(default_factory=dict)
    """Models that workflow and judge may call, by name."""
    evaluation: HeldOutSection = HeldOutSection()
    """Number of rollouts per task, and their sampling."""
    outcome_key: str | None = None
    """Metric (0 or 1) that decides whether a rollout passed, for pass@k; null uses the reward."""
    has_plot: bool = False
    """Also write the table as comparison.png; needs the extra `plot`."""
    engine: EngineSection = EngineSection()
    """The sampler."""
    rollout: Annotated[RolloutSection, Unused(ROLLOUT_KNOBS, "an evaluation trains nothing")] = RolloutSection()
    """Execution of workflows."""
    seed: int = Field(default=42, ge=0)
    """Seed of sampling and of the bootstrap intervals."""
    num_cpu_threads: NumThreads = 1
    """Threads of torch's CPU kernels. On small virtual machines 2 are slower than 1; on machines with many cores try
    more."""
    has_progress: bool = True
    """Show live progress on the console."""

    _add_tasks = model_validator(mode="before")(add_environment_tasks)

    @model_validator(mode="after")
    def _check_sets(self) -> EvalConfig:
        self.to_run_config()
        return self

    def to_run_config(self) -> RunConfig:
        """The equivalent run config for the first model."""
        changed = {
            "model": ModelSection(path=next(iter(self.models.values())), **self.model.model_dump()),
            "evaluation": EvaluationSection(**self.evaluation.model_dump()),
            "experience": ExperienceSection(outcome_key=self.outcome_key),
            "monitor": MonitorSection(has_progress=self.has_progress),
        }
        return RunConfig(**self.list_shared(RunConfig) | changed)


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


class CollectConfig(RunConfig):
    """Conversations of the workflow that the judge accepts, as `tunesmith collect`."""

    teacher: AuxiliaryModelSection | None = None
    """Model that the workflow calls: on a server (`base_url`), or local; null is the run's own model, so that rows are
    its own accepted rollouts (rejection sampling)."""
    num_runs: int = Field(default=4, ge=1)
    """Rollouts per task; raise it if few tasks get a row."""
    min_reward: float = Field(default=1.0, allow_inf_nan=False)
    """Least reward of a rollout that is kept."""
    max_rollouts_per_task: int = Field(default=1, ge=1)
    """Rollouts that are kept per task, those with the highest reward; more give easy tasks more weight."""
    max_tasks: int | None = Field(default=None, ge=1)
    """Maximum number of tasks, the first ones; null runs all."""
