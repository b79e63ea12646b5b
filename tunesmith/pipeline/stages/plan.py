"""A pipeline before it runs: its stages, what each needs of earlier ones, and what tells it from another.

A reference is a text `stage:NAME` (the model that the stage left) or `stage:NAME/FILE` anywhere in a stage's settings.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tunesmith.config import (
    EvalConfig,
    ExportSection,
    FunctionStage,
    PipelineConfig,
    PreferenceConfig,
    PrepareSection,
    RunConfig,
    Section,
    SftConfig,
)
from tunesmith.errors import ConfigError
from tunesmith.pipeline.session.load_config import build_section, describe_validation_error, load_values

REFERENCE = re.compile(r"stage:(?P<stage>[^/]+)(?:/(?P<file>.+))?")
SECTIONS: Mapping[str, type[Section]] = {
    "prepare": PrepareSection,
    "sft": SftConfig,
    "prefer": PreferenceConfig,
    "rl": RunConfig,
    "eval": EvalConfig,
    "export": ExportSection,
    "function": FunctionStage,
}
"""What each kind of stage runs on."""
LEAVES_MODEL = ("sft", "prefer", "rl", "export")
SILENT_KEYS = ("monitor", "has_progress")
"""What changes nothing that a stage makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What one stage takes from an earlier one."""

    stage: str
    file: str | None
    """None means the model that the stage left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """One stage of a pipeline."""

    name: str
    kind: str
    values: Mapping[str, Any]
    """All its settings, references as they were written."""
    references: tuple[Reference, ...]
    """What its settings name of earlier stages."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Earlier stages that its settings name."""
        return tuple(dict.fromkeys(reference.stage for reference in self.references))

    @property
    def digest(self) -> str:
        """Equal for equal settings."""
        told = {key: value for key, value in self.values.items() if key not in SILENT_KEYS}
        return hashlib.sha256(json.dumps([self.kind, told], sort_keys=True).encode()).hexdigest()

    def resolve(self, find: Callable[[Reference], str]) -> Section:
        """The settings to run on, with `find` saying what each reference means."""

        def replace(text: str) -> str:
            reference = read_reference(text)
            return text if reference is None else find(reference)

        values = map_texts(self.values, replace)
        kind = {"kind": self.kind} if self.kind == "function" else {}
        return build_section(SECTIONS[self.kind], values | kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which stages a command is about."""

    only: str | None = None
    """This one alone."""
    start_from: str | None = None
    """This one and those after it."""
    is_again: bool = False
    """Make them anew even where they are done."""

    def pick(self, stages: Sequence[PlannedStage]) -> list[PlannedStage]:
        names = [stage.name for stage in stages]
        if self.only is not None and self.start_from is not None:
            raise ConfigError("--only and --from are both given: choose one")
        for name in (self.only, self.start_from):
            if name is not None and name not in names:
                raise ConfigError(f"there is no stage {name!r}; the stages are {', '.join(names)}")
        if self.only is not None:
            return [stages[names.index(self.only)]]
        return list(stages[0 if self.start_from is None else names.index(self.start_from) :])


def load_pipeline(path: Path | str, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Read a pipeline file; every fault names its stage and key."""
    values = load_values(path, overrides)
    try:
        return PipelineConfig.model_validate(values)
    except ValidationError as error:
        faults = [fault | {"loc": drop_kind(fault["loc"])} for fault in error.errors()]
        raise ConfigError("; ".join(describe_validation_error(fault) for fault in faults)) from error


def drop_kind(place: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Of stages, name, kind, key ... the kind is the checker's word."""
    return (*place[:2], *place[3:]) if place[:1] == ("stages",) else place


def plan_stages(config: PipelineConfig) -> list[PlannedStage]:
    """The stages in order, when every reference names something that an earlier stage makes."""
    planned: dict[str, PlannedStage] = {}
    for name, stage in config.stages.items():
        values = stage.model_dump(mode="json", exclude={"kind"}, exclude_unset=True)
        found = map(read_reference, list_texts(values))
        references = tuple(reference for reference in found if reference is not None)
        for reference in references:
            check_reference(reference, planned, config, where=name)
        planned[name] = PlannedStage(name=name, kind=stage.kind, values=values, references=references)
    return list(planned.values())


def read_reference(text: str) -> Reference | None:
    match = REFERENCE.fullmatch(text)
    return None if match is None else Reference(stage=match["stage"], file=match["file"])


def check_reference(
    reference: Reference, earlier: Mapping[str, PlannedStage], config: PipelineConfig, *, where: str
) -> None:
    written = f"stages.{where}: stage:{reference.stage}"
    if reference.stage not in earlier:
        why = "comes no earlier" if reference.stage in config.stages else "is no stage"
        raise ConfigError(f"{written}: {reference.stage!r} {why}; earlier are {', '.join(earlier) or 'none'}")
    source = earlier[reference.stage]
    leaves_model = source.kind in LEAVES_MODEL and "hf" in source.values.get("formats", ("hf",))
    if reference.file is None and not leaves_model:
        raise ConfigError(f"{written}: a stage of kind {source.kind} leaves no model; name a file, as {written}/NAME")
    if reference.file is not None and ".." in Path(reference.file).parts:
        raise ConfigError(f"{written}/{reference.file} leads out of the stage's folder")


def list_texts(value: Any) -> list[str]:
    """All texts in nested values."""
    found: list[str] = []

    def note(text: str) -> str:
        found.append(text)
        return text

    map_texts(value, note)
    return found


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Nested values with every text changed; keys stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_texts(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(inner, change) for inner in value]
    return value
