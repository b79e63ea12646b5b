"""Every knob of a pipeline (`tunesmith run`): its stages, in order, each with the knobs of its own command.

A stage names what an earlier one made as `stage:NAME`, the model that it left, or `stage:NAME/FILE`, a file or folder
that it wrote. So whatever depends on what is known before anything runs.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tunesmith.config.evaluation import EvalConfig
from tunesmith.config.export import ExportSection
from tunesmith.config.finetune import FinetuneConfig
from tunesmith.config.preference import PreferenceConfig
from tunesmith.config.prepare import PrepareSection
from tunesmith.config.run import RunConfig
from tunesmith.config.section import Section

STAGE_NAME = re.compile(r"[A-Za-z0-9][\w-]*")
RESERVED_NAMES = ("stages",)
OWN_KEYS = ("project", "name", "checkpoint_root_dir", "continue_from_checkpoint")
"""Knobs of a training run that the pipeline sets."""


class PrepareStage(PrepareSection):
    """Data into conversations, as `tunesmith prepare` does; writes train.jsonl and eval.jsonl."""

    kind: Literal["prepare"]
    """What the stage does; the stage's own name where it is one of the kinds."""


class SftStage(FinetuneConfig):
    """Fine-tuning, as `tunesmith sft` does; leaves a model."""

    kind: Literal["sft"]
    """As above."""


class PreferStage(PreferenceConfig):
    """Learning from preferences, as `tunesmith prefer` does; leaves a model."""

    kind: Literal["prefer"]
    """As above."""


class RlStage(RunConfig):
    """Reinforcement learning, as `tunesmith tune` does; leaves a model."""

    kind: Literal["rl"]
    """As above."""

    @model_validator(mode="after")
    def _check_place(self) -> RlStage:
        given = [key for key in OWN_KEYS if key in self.model_fields_set]
        if given:
            raise ValueError(
                f"{', '.join(given)} cannot be set: where the run is, and that it goes on, is the pipeline's"
            )
        return self


class EvalStage(EvalConfig):
    """Models side by side, as `tunesmith eval` does; writes comparison.json and comparison.md."""

    kind: Literal["eval"]
    """As above."""


class ExportStage(ExportSection):
    """A model for others, as `tunesmith export` does; leaves a model where `formats` holds hf."""

    kind: Literal["export"]
    """As above."""


class FunctionStage(Section):
    """A step of your own: a function of a folder, which it fills."""

    kind: Literal["function"]
    """As above."""
    function: str
    """`module:function` or `file.py:function`, called as `function(out_dir, **args)` with a new folder; may return a
    mapping of names to numbers or words for the report."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments besides the folder."""


Stage = Annotated[
    PrepareStage | SftStage | RlStage | EvalStage | ExportStage | PreferStage | FunctionStage,
    Field(discriminator="kind"),
]
KINDS = ("prepare", "sft", "rl", "eval", "export", "prefer", "function")


class PipelineConfig(Section):
    """Stages in order, and the folder in which they leave what they make."""

    folder: str
    """Folder of the pipeline, one subfolder a stage; the same command goes on in it."""
    variables: dict[str, Any] = Field(default_factory=dict)
    """Values of your own, to be written once and read anywhere as `${variables.NAME}`."""
    stages: dict[str, Stage] = Field(min_length=1)
    """Name -> stage. A stage called prepare, sft, prefer, rl, eval or export is of that kind; others say their
    `kind`."""

    @model_validator(mode="before")
    @classmethod
    def _read_kinds(cls, values: Any) -> Any:
        stages = values.get("stages") if isinstance(values, dict) else None
        if not isinstance(stages, dict):
            return values
        named = {
            name: {"kind": name} | stage if isinstance(stage, dict) and name in KINDS else stage
            for name, stage in stages.items()
        }
        for name, stage in named.items():
            if isinstance(stage, dict) and stage.get("kind") not in KINDS:
                given = "names no kind" if "kind" not in stage else f"is of kind {stage['kind']!r}"
                raise ValueError(f"stages.{name} {given}; kind must be one of {', '.join(KINDS)}")
        return values | {"stages": named}

    @field_validator("stages")
    @classmethod
    def _check_names(cls, stages: dict[str, Stage]) -> dict[str, Stage]:
        for name in stages:
            if not STAGE_NAME.fullmatch(name) or name in RESERVED_NAMES:
                raise ValueError(f"{name!r} cannot name a stage: use letters, digits, '_' and '-', and not 'stages'")
        return stages
