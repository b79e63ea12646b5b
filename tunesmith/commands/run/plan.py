"""Parsing of pipeline files: stages, references between them, and digests of their settings.

A reference is a string `stage:NAME` (the stage's model) or `stage:NAME/FILE` (a file of its output) in the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tunesmith.commands.references import StageReference, list_strings, map_strings, read_reference
from tunesmith.commands.run.config import PipelineConfig
from tunesmith.commands.table import STAGES, import_named
from tunesmith.config import Section
from tunesmith.errors import ConfigError
from tunesmith.runs.load_config import build_section, describe_validation_error, load_values
from tunesmith.runs.workspace import compute_digest

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
    try:
        return PipelineConfig.model_validate(values)
    except ValidationError as error:
        faults = [fault | {"loc": drop_kind(fault["loc"])} for fault in error.errors()]
        raise ConfigError("; ".join(describe_validation_error(fault) for fault in faults)) from error


def drop_kind(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Location of a validation error without the kind that pydantic inserts after the stage's name."""
    return (*location[:2], *location[3:]) if location[:1] == ("stages",) else location


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
