"""Knobs of a pipeline (`tunesmith run`): its stages in order, each with the knobs of its command.

A stage refers to the result of an earlier one as `stage:NAME` (its model) or `stage:NAME/FILE` (a file or folder that
it wrote), so all dependencies are known before the first stage runs. The kinds of stages are those of the table of
commands.

Rounds are a list of stages that is repeated, each round starting from the model of the one before.
An entry of `stages` with `kind: rounds` is replaced by its stages, once for each round, before the file is validated:
stage `rl` of round 2 is `rl_2`. In the strings of the inner stages,

    stage:NAME, stage:NAME/FILE   another stage of the entry is that of the same round
    stage:previous                the model of the round before; in round 1 it is `start`
    round:number                  the number of the round, from 1
    round:NAME                    the round's entry of `values.NAME`

Outside, `stage:ENTRY` is the model of the last round.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, Union

from pydantic import Field, ValidationError, field_validator, model_validator

from tunesmith.commands.references import StageReference, list_strings, read_reference
from tunesmith.commands.table import STAGES, import_named
from tunesmith.config import Section
from tunesmith.errors import ConfigError
from tunesmith.runs.load_config import build_section, describe_validation_error, load_values, map_strings
from tunesmith.runs.workspace import compute_digest

ROUNDS, STAGE, ROUND, PREVIOUS, NUMBER = "rounds", "stage:", "round:", "previous", "number"


class RoundsSection(Section):
    """Stages that are repeated."""

    count: int = Field(ge=1)
    """Number of rounds. A higher number continues a finished pipeline with further rounds."""
    start: str
    """Model of the first round: `stage:NAME`, a folder or a hub id."""
    model: str
    """Stage of a round whose model the next round starts from."""
    values: dict[str, list[Any]] = Field(default_factory=dict)
    """Values by name, one for each round, for instance a shrinking sigma; the list may be longer than `count`."""
    stages: dict[str, dict[str, Any]] = Field(min_length=1)
    """Name -> stage of a round, in order."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if self.model not in self.stages:
            raise ValueError(f"model={self.model!r} is not a stage of a round; they are {', '.join(self.stages)}")
        if PREVIOUS in self.stages:
            raise ValueError(f"a stage of a round cannot be named {PREVIOUS!r}, which is the round before")
        if NUMBER in self.values:
            raise ValueError(f"values.{NUMBER} cannot be set: it is the number of the round")
        for name, given in self.values.items():
            if len(given) < self.count:
                raise ValueError(f"values.{name} has {len(given)} values for {self.count} rounds: it needs one each")
        return self

    def expand(self) -> dict[str, dict[str, Any]]:
        """The stages of all rounds by their names, in order."""
        expanded = {}
        for number in range(1, self.count + 1):
            for name, stage in self.stages.items():
                given = stage if "kind" in stage else {"kind": name, **stage}
                expanded[self.name_stage(name, number)] = map_strings(given, partial(self._read, number=number))
        return expanded

    @staticmethod
    def name_stage(name: str, number: int) -> str:
        return f"{name}_{number}"

    def _read(self, text: str, *, number: int) -> Any:
        """What a string of an inner stage stands for in a round."""
        if text.startswith(ROUND):
            name = text.removeprefix(ROUND)
            if name == NUMBER:
                return number
            if name not in self.values:
                raise ValueError(f"{text!r}: values has no {name!r}, it has {', '.join(self.values) or 'none'}")
            return self.values[name][number - 1]
        stage, slash, file = text.removeprefix(STAGE).partition("/")
        if not text.startswith(STAGE):
            return text
        if stage == PREVIOUS:
            return (self.start if number == 1 else STAGE + self.name_stage(self.model, number - 1)) + slash + file
        return STAGE + (self.name_stage(stage, number) if stage in self.stages else stage) + slash + file


def expand_rounds(stages: Mapping[str, Any]) -> dict[str, Any]:
    """The stages of a file with entries of rounds replaced; ValueError names the entry that is invalid."""
    expanded: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    for name, stage in stages.items():
        if not isinstance(stage, Mapping) or stage.get("kind") != ROUNDS:
            added = {name: stage}
        else:
            try:
                rounds = build_section(RoundsSection, {key: value for key, value in stage.items() if key != "kind"})
                added = rounds.expand()
            except ValueError as error:
                raise ValueError(f"stages.{name}: {error}") from error
            aliases[STAGE + name] = STAGE + rounds.name_stage(rounds.model, rounds.count)
        taken = next((each for each in added if each in expanded or (each != name and each in stages)), None)
        if taken is not None:
            raise ValueError(f"stages.{name} has a stage {taken!r}, which is already the name of another stage")
        expanded |= map_strings(added, lambda text: aliases.get(text, text)) if aliases else added
    return expanded


STAGE_NAME = re.compile(r"[A-Za-z0-9][\w-]*")
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
            if not STAGE_NAME.fullmatch(name) or name == "stages":
                raise ValueError(
                    f"{name!r} is not a valid stage name: use letters, digits, '_' and '-', and not 'stages'"
                )
        return stages


KEYS_WITHOUT_EFFECT = ("monitor", "has_progress")
"""Top-level keys that do not change a stage's output, and so are not part of its digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """One stage of a pipeline with validated references."""

    name: str
    kind: str
    values: Mapping[str, Any]
    """All settings, with references unresolved."""
    references: tuple[StageReference, ...]
    """References in the settings, in order."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the stages that the settings refer to."""
        return tuple(dict.fromkeys(reference.stage for reference in self.references))

    @property
    def digest(self) -> str:
        """Hash of the kind and of all settings that can change the output."""
        relevant = {key: value for key, value in self.values.items() if key not in KEYS_WITHOUT_EFFECT}
        return compute_digest([self.kind, relevant])

    def resolve(self, find: Callable[[StageReference], str]) -> Section:
        """The settings object, with each reference replaced by the path that `find` returns."""

        def replace(text: str) -> str:
            reference = read_reference(text)
            return text if reference is None else find(reference)

        values = map_strings(self.values, replace)
        entry = STAGES[self.kind]
        kind: type[Section] = import_named(str(entry.config or entry.stage_config))
        return build_section(kind, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSelection:
    """The stages that a command runs."""

    only: str | None = None
    """Run only this stage."""
    start_from: str | None = None
    """Run this stage and all later ones."""
    is_rerun: bool = False
    """Run selected stages again even if they are done."""

    def select(self, stages: Sequence[PlannedStage]) -> list[PlannedStage]:
        names = [stage.name for stage in stages]
        if self.only is not None and self.start_from is not None:
            raise ConfigError("--only and --from are both set: choose one")
        for name in (self.only, self.start_from):
            if name is not None and name not in names:
                raise ConfigError(f"there is no stage {name!r}; the stages are {', '.join(names)}")
        if self.only is not None:
            return [stages[names.index(self.only)]]
        return list(stages[0 if self.start_from is None else names.index(self.start_from) :])


def name_selected(config: PipelineConfig, *, only: str | None = None, start_from: str | None = None, **_: bool) -> str:
    """The names of the stages that a command runs; raises ConfigError for wrong references or names."""
    selection = StageSelection(only=only, start_from=start_from)
    return ", ".join(stage.name for stage in selection.select(plan_stages(config)))


def load_pipeline(path: Path | str, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Read a pipeline file; validation errors name stage and key."""
    values = load_values(str(path), overrides)
    if "stages" not in values:
        raise ConfigError(f"{path} has no stages, so it is no pipeline file; `tunesmith tune` takes the file of a run")
    try:
        return PipelineConfig.model_validate(values)
    except ValidationError as error:
        faults = error.errors()
        for fault in faults:
            if fault["loc"][:1] == ("stages",):  # pydantic inserts the kind after the stage's name
                fault["loc"] = (*fault["loc"][:2], *fault["loc"][3:])
        raise ConfigError("; ".join(map(describe_validation_error, faults))) from error


def plan_stages(config: PipelineConfig) -> list[PlannedStage]:
    """The stages in order; raises ConfigError for a reference to anything but the output of an earlier stage."""
    planned: dict[str, PlannedStage] = {}
    for name, stage in config.stages.items():
        values = stage.model_dump(mode="json", exclude={"kind"}, exclude_unset=True)
        found = map(read_reference, list_strings(values))
        references = tuple(reference for reference in found if reference is not None)
        for reference in references:
            check_reference(reference, planned, config, stage_name=name)
        kind = type(stage).model_fields["kind"].default
        planned[name] = PlannedStage(name=name, kind=kind, values=values, references=references)
    return list(planned.values())


def check_reference(
    reference: StageReference, earlier: Mapping[str, PlannedStage], config: PipelineConfig, *, stage_name: str
) -> None:
    """Raise ConfigError unless the reference names the model or a file of an earlier stage."""
    written = f"stages.{stage_name}: stage:{reference.stage}"
    if reference.stage not in earlier:
        why = "is not an earlier stage" if reference.stage in config.stages else "is not a stage"
        raise ConfigError(f"{written}: {reference.stage!r} {why}; earlier stages: {', '.join(earlier) or 'none'}")
    source = earlier[reference.stage]
    has_model = STAGES[source.kind].has_model and "hf" in source.values.get("formats", ("hf",))
    if reference.file is None and not has_model:
        raise ConfigError(f"{written}: a stage of kind {source.kind} has no model; name a file, as in {written}/FILE")
    if reference.file is not None and ".." in Path(reference.file).parts:
        raise ConfigError(f"{written}/{reference.file} is outside of the stage's folder")
