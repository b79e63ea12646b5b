"""Knobs of ET-Agent's stages: the flywheel, group-wise Pareto sampling of questions, and the filter of trajectories."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from tunesmith.config.engine import EngineSection
from tunesmith.config.environment import EnvironmentSection
from tunesmith.config.model import AuxiliaryModelSection, ModelSection
from tunesmith.config.rollout import RolloutSection
from tunesmith.config.run import DatasetSection, MonitorSection, RunConfig
from tunesmith.config.section import ROLLOUT_KNOBS, TASK_KNOBS, Needs, NumThreads, Section, Unused

OperatorName = Literal[
    "rollout", "rewrite_redundant", "refine_thoughts", "repair_flaw", "hint_after_flaw", "hint_at_end", "reflect"
]
OPERATORS: tuple[OperatorName, ...] = get_args(OperatorName)
OWN_MODEL = "model"
"""Name of the stage's own model among the roles."""


class RolesSection(Section):
    """Who does what: `model` (the model of the stage), a name in `auxiliary_models`, or a Python function."""

    policy: str = OWN_MODEL
    """Model that rolls out and continues trajectories; not a function."""
    analyst: str = OWN_MODEL
    """Finds the first redundant or wrong step: a model, or a function as `module:function` or `file.py:function`."""
    author: str = OWN_MODEL
    """Writes steps, thoughts and reflections: a model, or a function."""
    judge: str | None = None
    """Model whose votes decide whether an answer is right; null uses the function in `judge`."""


class FlywheelConfig(Section):
    """A flywheel over the questions of a data set; its result is a file of judged trajectories."""

    later_knobs: ClassVar[tuple[str, ...]] = ("role_max_tokens",)
    model: ModelSection
    """The model whose trajectories are collected."""
    auxiliary_models: dict[str, AuxiliaryModelSection] = Field(default_factory=dict)
    """Further models for roles, by name: local ones, or at OpenAI-compatible URLs."""
    roles: RolesSection = RolesSection()
    """Who continues, reviews, rewrites and judges trajectories."""
    environment: EnvironmentSection = EnvironmentSection()
    """Protocol, tools and limits of the agent."""
    train_dataset: Annotated[DatasetSection, Unused(TASK_KNOBS, "a flywheel takes every question")]
    """The questions: rows with `question` and what the judge needs."""
    judge: str = "tunesmith.judges.composite:squad_judge"
    """Judge of answers, as `module:function` or `file.py:function`; its reward is a trajectory's correctness."""
    correct_at: float = Field(default=0.75, gt=0)
    """Correctness from which a trajectory is right."""
    num_votes: Annotated[int, Needs("roles.judge", reason="the model that votes")] = Field(default=3, ge=1)
    """Votes of `roles.judge` for each answer, always all of them. A tie has no verdict, so an odd number is better."""
    role_max_tokens: int | None = Field(default=None, ge=1)
    """Tokens of a reply of the stage's model as analyst, author or judge, which is longer than a step of an agent; null
    is `model.max_tokens`. Auxiliary models have their own `max_tokens`."""
    num_iterations: int = Field(default=3, ge=0)
    """Iterations of operators after the first rollouts; 0 only rolls out."""
    num_rollouts: int = Field(default=1, ge=1)
    """First rollouts of each question."""
    operators: tuple[OperatorName, ...] = Field(default=OPERATORS, min_length=1)
    """Operators to apply. To right trajectories: rollout, rewrite_redundant, refine_thoughts; to wrong ones:
    repair_flaw, hint_after_flaw, hint_at_end, reflect."""
    max_parents_per_question: int | None = Field(default=None, ge=1)
    """Trajectories of a question that operators are applied to in one iteration, right ones with few calls first; null
    takes all that no operator was applied to yet. The published code takes one."""
    max_per_question: int = Field(default=10, ge=1)
    """Maximum number of different trajectories of a question; equal ones do not count."""
    extra_calls: int = Field(default=4, ge=0)
    """Tool calls that a continued trajectory may have above `environment.max_calls`."""
    extra_tokens: int = Field(default=512, ge=0)
    """Sampled tokens that a continued trajectory may have above `environment.max_tokens`."""
    hints: tuple[str, ...] = ()
    """Sentences of the hint operators, one of which is drawn each time; empty uses built-in ones for the tools of the
    environment."""
    batch_size: int = Field(default=64, ge=1)
    """Attempts that run at once and are saved together; a killed stage repeats at most one batch."""
    engine: EngineSection = EngineSection()
    """The sampler."""
    rollout: Annotated[RolloutSection, Unused(ROLLOUT_KNOBS, "a flywheel trains nothing")] = RolloutSection()
    """Limits of one attempt: time, concurrency, share of failures."""
    seed: int = Field(default=42, ge=0)
    """Seed of sampling and of hints; on a CPU, equal seeds give equal trajectories."""
    num_cpu_threads: NumThreads = 1
    """Threads of torch's CPU kernels."""
    has_progress: bool = True
    """Print a line for every batch."""

    @model_validator(mode="after")
    def _check_knobs(self) -> Self:
        for name, value in self.roles.model_dump().items():
            if name in ("policy", "judge") and value is not None and ":" in value:
                raise ValueError(f"roles.{name}={value!r} must be a model: {OWN_MODEL}, or one of auxiliary_models")
            if value not in (None, OWN_MODEL, *self.auxiliary_models) and ":" not in value:
                known = ", ".join((OWN_MODEL, *self.auxiliary_models))
                raise ValueError(f"roles.{name}={value!r} is neither a model ({known}) nor module:function")
        for hint in self.hints:
            if len(hint.split()) < 2:
                raise ValueError(f"hints contains {hint!r}: each hint must be a sentence of two words or more")
        return self

    def to_run_config(self) -> RunConfig:
        """The equivalent run config, with which models are loaded and checked."""
        workflow, monitor = "tunesmith.environments:tool_agent", MonitorSection(has_progress=self.has_progress)
        return RunConfig(**self.list_shared(RunConfig), workflow=workflow, monitor=monitor)


class ParetoSection(Section):
    """Selection of questions by the spread of correctness and of tool calls over their rollouts."""

    data: str
    """JSON lines file, or another data set file, of questions with the numbers of each rollout; usually the output of a
    `pass_rate` stage."""
    num_selected: int = Field(default=8000, ge=1)
    """Maximum number of questions to select."""
    correctness_key: str = "pass_rate_correctness"
    """Field with the correctness of each rollout, a list."""
    tool_calls_key: str = "pass_rate_tool_calls"
    """Field with the number of tool calls of each rollout, a list."""
    correct_at: float = Field(default=0.75, gt=0)
    """Correctness from which a rollout counts as right; questions without a right and a wrong rollout are removed
    before the selection."""
    stratify_by: str | None = None
    """Field with the source of a question. If set, fronts are found within each source, and the sources share the
    selection in proportion to their questions with mixed outcomes; null finds fronts over all questions."""
    shares: Annotated[dict[str, float] | None, Needs("stratify_by")] = None
    """Relative share of each source in the selection, instead of proportional ones; sources without one are left
    out."""
    seed: int = Field(default=42, ge=0)
    """Seed of ties between questions with equal spreads."""

    @model_validator(mode="after")
    def _check_shares(self) -> ParetoSection:
        if self.shares is not None and not (self.shares and all(share > 0 for share in self.shares.values())):
            raise ValueError(f"shares={self.shares} must give every source that it names a share above 0")
        return self


class RftFilterSection(Section):
    """Filter of trajectories for rejection fine-tuning (RFT): right, well-formed, without failed calls."""

    data: str | tuple[str, ...]
    """JSON lines file, or several, of rows with `question`, `transcript` and `correctness`."""
    environment: EnvironmentSection | None = None
    """Environment whose prompt, and with native calls whose tools, the conversations have; null uses the `system` of
    each row. Set it to the environment that trains later."""
    correct_at: float = Field(default=0.75, gt=0)
    """Correctness from which a trajectory is right."""
    has_format_check: bool = True
    """Remove trajectories with a format error."""
    max_failed_calls: int | None = Field(default=0, ge=0)
    """Maximum number of failed tool calls of a trajectory; null keeps any number."""
    max_per_question: int | None = Field(default=4, ge=1)
    """Maximum number of trajectories of a question; different orders of tools are kept first, then those with fewer
    calls. null keeps all."""
    trains_forced: bool = False
    """Also train text that the model did not write, such as hints."""
    embedding_model: str | None = None
    """Folder or hub id of a sentence-transformers model, which embeds trajectories for the report of diversity; needs
    the extra `embeddings`. null reports the spread of word pairs instead, under another name."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.data,) if isinstance(self.data, str) else self.data

    @model_validator(mode="after")
    def _check_paths(self) -> RftFilterSection:
        if not self.paths:
            raise ValueError("data is an empty list: name at least one file")
        return self
