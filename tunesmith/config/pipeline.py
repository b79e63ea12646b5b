"""The stages of a pipeline (`tunesmith run`): the knobs of their commands, and the kind by which a file names them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from tunesmith.config.et_agent import FlywheelConfig, ParetoSection, RftFilterSection
from tunesmith.config.evaluation import CollectConfig, EvalConfig, PassRateConfig
from tunesmith.config.export import ExportSection
from tunesmith.config.prepare import PrepareSection
from tunesmith.config.run import RunConfig
from tunesmith.config.section import Section
from tunesmith.config.sft import PreferenceConfig, SftConfig

MANAGED_KEYS = ("project", "name", "checkpoint_root_dir", "continue_from_checkpoint")
"""Knobs of a run that the pipeline sets itself."""


KIND = Field(description="Kind of the stage; it may be omitted if the stage's name is a kind.")


class PrepareStage(PrepareSection):
    """Data preparation, as `tunesmith prepare`; writes train.jsonl and eval.jsonl."""

    kind: Annotated[Literal["prepare"], KIND] = "prepare"


class SftStage(SftConfig):
    """Supervised fine-tuning, as `tunesmith sft`; its result is a model."""

    kind: Annotated[Literal["sft"], KIND] = "sft"


class PreferStage(PreferenceConfig):
    """Preference training, as `tunesmith prefer`; its result is a model."""

    kind: Annotated[Literal["prefer"], KIND] = "prefer"


class ManagedRun(Section):
    """A run whose folder the pipeline chooses."""

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        given = [key for key in MANAGED_KEYS if key in self.model_fields_set]
        if given:
            raise ValueError(
                f"{', '.join(given)} cannot be set here: the pipeline chooses the run folder and resumes the run"
            )
        return self


class RlStage(ManagedRun, RunConfig):
    """Reinforcement learning, as `tunesmith tune`; its result is a model."""

    kind: Annotated[Literal["rl"], KIND] = "rl"


class PassRateStage(ManagedRun, PassRateConfig):
    """Rollouts on training tasks without training, as `tunesmith pass-rate`; writes tasks.jsonl."""

    kind: Annotated[Literal["pass_rate"], KIND] = "pass_rate"


class CollectStage(ManagedRun, CollectConfig):
    """Conversations of the workflow that the judge accepts, as `tunesmith collect`; writes conversations.jsonl."""

    kind: Annotated[Literal["collect"], KIND] = "collect"


class ParetoStage(ParetoSection):
    """Group-wise Pareto sampling of questions; writes train.jsonl."""

    kind: Annotated[Literal["pareto"], KIND] = "pareto"


class EvalStage(EvalConfig):
    """Evaluation of models side by side, as `tunesmith eval`; writes comparison.json and comparison.md."""

    kind: Annotated[Literal["eval"], KIND] = "eval"


class ExportStage(ExportSection):
    """Export, as `tunesmith export`; its result is a model if `formats` contains hf."""

    kind: Annotated[Literal["export"], KIND] = "export"


class RftFilterStage(RftFilterSection):
    """Filter of trajectories for rejection fine-tuning; writes train.jsonl, which an sft stage reads."""

    kind: Annotated[Literal["rft_filter"], KIND] = "rft_filter"


class FlywheelStage(FlywheelConfig):
    """Trajectories that are rolled out, rewritten, repaired and judged; writes trajectories.jsonl."""

    kind: Annotated[Literal["flywheel"], KIND] = "flywheel"


class FunctionStage(Section):
    """A user function that writes its results to a folder."""

    kind: Annotated[Literal["function"], KIND] = "function"
    function: str
    """Function, as `module:function` or `file.py:function`, called as `function(out_dir, **args)` with a new folder. It
    may return a mapping of names to numbers or strings for the report."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
