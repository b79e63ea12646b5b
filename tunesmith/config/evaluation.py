"""Every knob of an evaluation of several models side by side (`tunesmith eval` on a file that names `models`)."""

from __future__ import annotations

from pydantic import Field, model_validator

from tunesmith.config.experience import ExperienceSection
from tunesmith.config.model import AuxiliaryModelSection, ModelSection, ServedModelSection
from tunesmith.config.run import (
    DatasetSection,
    EngineSection,
    EvaluationSection,
    HeldOutSection,
    MonitorSection,
    RolloutSection,
    RunConfig,
)
from tunesmith.config.section import NumThreads, Section


class EvalConfig(Section):
    """Which models are tried on which held-out tasks, in which agent, and how they are sampled."""

    models: dict[str, str] = Field(min_length=1)
    """Label -> folder, hub id, adapter, or run folder (its last checkpoint), in the order of the table; every later
    model is compared with every earlier one."""
    workflow: str
    """The agent, as `module:function` or `file.py:function`."""
    judge: str | None = None
    """The judge, in the same form; None takes the reward from the workflow."""
    eval_datasets: dict[str, DatasetSection] = Field(min_length=1)
    """Held-out task sets by name."""
    model: ServedModelSection = ServedModelSection()
    """How every model is loaded and sampled."""
    auxiliary_models: dict[str, AuxiliaryModelSection] = Field(default_factory=dict)
    """Models that help workflow and judge."""
    evaluation: HeldOutSection = HeldOutSection()
    """How often each task is tried, and how."""
    outcome_key: str | None = None
    """Metric of 0 or 1 that says whether a run passed, for pass@k; None takes the reward."""
    has_plot: bool = False
    """Draw the table too; needs the extra `plot`."""
    engine: EngineSection = EngineSection()
    """The sampler."""
    rollout: RolloutSection = RolloutSection()
    """How workflows run."""
    seed: int = Field(default=42, ge=0)
    """Fixes every token that is sampled, and the resamples of the intervals."""
    num_cpu_threads: NumThreads = 1
    """Threads of torch's CPU kernels; on small virtual machines two are slower than one, on large ones try more."""
    has_progress: bool = True
    """Show live progress on the console."""

    @model_validator(mode="after")
    def _check_sets(self) -> EvalConfig:
        self.to_run_config()
        return self

    def to_run_config(self) -> RunConfig:
        """The run file of which this is the evaluation, for the first of the models."""
        return RunConfig(
            model=ModelSection(path=next(iter(self.models.values())), **self.model.model_dump()),
            workflow=self.workflow,
            judge=self.judge,
            eval_datasets=self.eval_datasets,
            auxiliary_models=self.auxiliary_models,
            evaluation=EvaluationSection(**self.evaluation.model_dump()),
            experience=ExperienceSection(outcome_key=self.outcome_key),
            engine=self.engine,
            rollout=self.rollout,
            seed=self.seed,
            num_cpu_threads=self.num_cpu_threads,
            monitor=MonitorSection(has_progress=self.has_progress),
        )
