"""The stages of a pipeline (`tunesmith run`): the knobs of their commands, and the kind by which a file names them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from tunesmith.config.et_agent import FlywheelConfig, ParetoSection, RftFilterSection
from tunesmith.config.evaluation import EvalConfig, PassRateConfig
from tunesmith.config.export import ExportSection
from tunesmith.config.prepare import PrepareSection
from tunesmith.config.run import RunConfig
from tunesmith.config.section import Section
from tunesmith.config.sft import PreferenceConfig, SftConfig

MANAGED_KEYS = ("project", "name", "checkpoint_root_dir", "continue_from_checkpoint")
"""Knobs of a run that the pipeline sets itself."""


class PrepareStage(PrepareSection):
    """Data preparation, as `tunesmith prepare`; writes train.jsonl and eval.jsonl."""

    kind: Literal["prepare"] = "prepare"
    """Kind of the stage; it may be omitted if the stage's name is a kind."""


class SftStage(SftConfig):
    """Supervised fine-tuning, as `tunesmith sft`; its result is a model."""

    kind: Literal["sft"] = "sft"
    """Kind of the stage; it may be omitted if the stage's name is a kind."""


class PreferStage(PreferenceConfig):
    """Preference training, as `tunesmith prefer`; its result is a model."""

    kind: Literal["prefer"] = "prefer"
    """Kind of the stage; it may be omitted if the stage's name is a kind."""


class RlStage(RunConfig):
    """Reinforcement learning, as `tunesmith tune`; its result is a model."""

    kind: Literal["rl"] = "rl"
    """Kind of the stage; it may be omitted if the stage's name is a kind."""

    @model_validator(mode="after")
    def _check_place(self) -> RlStage:
        refuse_managed_keys(self)
        return self


def refuse_managed_keys(config: RunConfig) -> None:
    """Raise if the stage sets the location of its run."""
    given = [key for key in MANAGED_KEYS if key in config.model_fields_set]
    if given:
        raise ValueError(
            f"{', '.join(given)} cannot be set here: the pipeline chooses the run folder and resumes the run"
        )


class PassRateStage(PassRateConfig):
    """Rollouts on training tasks without training, as `tunesmith pass-rate`; writes tasks.jsonl."""

    kind: Literal["pass_rate"] = "pass_rate"
    """Kind of the stage; it may be omitted if the stage's name is a kind."""

    @model_validator(mode="after")
    def _check_place(self) -> PassRateStage:
        refuse_managed_keys(self)
        return self


class ParetoStage(ParetoSection):
    """Group-wise Pareto sampling of questions; writes train.jsonl."""

    kind: Literal["pareto"] = "pareto"
    """Kind of the stage; it may be omitted if the stage's name is a kind."""


class EvalStage(EvalConfig):
    """Evaluation of models side by side, as `tunesmith eval`; writes comparison.json and comparison.md."""

    kind: Literal["eval"] = "eval"
    """Kind of the stage; it may be omitted if the stage's name is a kind."""


class ExportStage(ExportSection):
    """Export, as `tunesmith export`; its result is a model if `formats` contains hf."""

    kind: Literal["export"] = "export"
    """Kind of the stage; it may be omitted if the stage's name is a kind."""


class RftFilterStage(RftFilterSection):
    """Filter of trajectories for rejection fine-tuning; writes train.jsonl, which an sft stage reads."""

    kind: Literal["rft_filter"] = "rft_filter"
    """Kind of the stage; it may be omitted if the stage's name is a kind."""


class FlywheelStage(FlywheelConfig):
    """Trajectories that are rolled out, rewritten, repaired and judged; writes trajectories.jsonl."""

    kind: Literal["flywheel"] = "flywheel"
    """Kind of the stage; it may be omitted if the stage's name is a kind."""


class FunctionStage(Section):
    """A user function that writes its results to a folder."""

    kind: Literal["function"] = "function"
    """Kind of the stage; it may be omitted if the stage's name is a kind."""
    function: str
    """Function, as `module:function` or `file.py:function`, called as `function(out_dir, **args)` with a new folder. It
    may return a mapping of names to numbers or strings for the report."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
