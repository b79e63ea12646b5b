"""Knobs of a pipeline (`tunesmith run`): its stages in order, each with the knobs of its command.

A stage refers to the result of an earlier one as `stage:NAME` (its model) or `stage:NAME/FILE` (a file or folder that
it wrote), so all dependencies are known before the first stage runs. The kinds of stages are those of the table of
commands.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Field, field_validator, model_validator

from tunesmith.commands.run.rounds import ROUNDS, expand_rounds
from tunesmith.commands.table import STAGES, import_named
from tunesmith.config import Section

STAGE_NAME = re.compile(r"[A-Za-z0-9][\w-]*")
RESERVED_NAMES = ("stages",)
if TYPE_CHECKING:
    Stage = Section
else:
    Stage = Annotated[
        Union[tuple(import_named(entry.stage_config) for entry in STAGES.values())],  # noqa: UP007  # of a table
        Field(discriminator="kind"),
    ]


class PipelineConfig(Section):
    """Stages in order, and the folder of their results."""

    folder: str
    """Folder of the pipeline, with one subfolder per stage; repeating the command resumes in it."""
    variables: dict[str, Any] = Field(default_factory=dict)
    """User-defined values, referred to as `${variables.NAME}`."""
    stages: dict[str, Stage] = Field(min_length=1)
    """Name -> stage, in order. A stage whose name is a kind, such as prepare, sft or rl, has that kind; others set
    `kind`. An entry with `kind: rounds` is repeated: `docs/pipeline.md`."""

    @model_validator(mode="before")
    @classmethod
    def _read_kinds(cls, values: Any) -> Any:
        stages = values.get("stages") if isinstance(values, dict) else None
        if not isinstance(stages, dict):
            return values
        stages = expand_rounds(stages)
        named = {
            name: {"kind": name} | stage if isinstance(stage, dict) and name in STAGES else stage
            for name, stage in stages.items()
        }
        for name, stage in named.items():
            if isinstance(stage, dict) and stage.get("kind") not in STAGES:
                given = "has no kind" if "kind" not in stage else f"has the kind {stage['kind']!r}"
                raise ValueError(f"stages.{name} {given}; kind must be one of {', '.join((*STAGES, ROUNDS))}")
        return values | {"stages": named}

    @field_validator("stages")
    @classmethod
    def _check_names(cls, stages: dict[str, Stage]) -> dict[str, Stage]:
        for name in stages:
            if not STAGE_NAME.fullmatch(name) or name in RESERVED_NAMES:
                raise ValueError(
                    f"{name!r} is not a valid stage name: use letters, digits, '_' and '-', and not 'stages'"
                )
        return stages
