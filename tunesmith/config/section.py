"""Base class and field types shared by all config sections, and the conditions under which knobs have an effect.

A knob that only acts together with another one of its section says so where it is declared, and setting it otherwise
is an error that names the knob, its value and the reason:

    schedule: Literal["constant", "cosine"] = "constant"
    min_lr_ratio: Annotated[float, Needs("schedule", "cosine")] = 0.0

    min_lr_ratio=0.1 has no effect with schedule=constant: set schedule=cosine, or leave out min_lr_ratio

`Unused` on a field that holds a section names the knobs of that section which have no effect in this place, or only
under a condition on the sections beside it. Conditions are joined by `|` where one of them suffices. A knob at its
default, or null, which turns its feature off, is never an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tunesmith.arguments import suggest_name
from tunesmith.types import MIN_TEMPERATURE


def check_temperature(value: float) -> float:
    """Raise for a temperature too small to divide by in float32."""
    if 0 < value < MIN_TEMPERATURE:
        raise ValueError(f"a temperature must be 0 (greedy) or at least {MIN_TEMPERATURE:g}; got {value:g}")
    return value


Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(check_temperature)]
LearningRate = Annotated[float, Field(gt=0, le=1)]
"""AdamW changes a weight by about the learning rate per step, so values above 1 destroy any model."""
NumThreads = Annotated[int, Field(ge=1, le=1024)]
MAX_INTEGER = 2**63 - 1
"""Largest integer of torch and numpy."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The knob has an effect only if `knob` of the same section has the value `value` (one of them, if it is a tuple),
    holds it if it is a list, is above `above`, or, with neither, is set."""

    knob: str
    """Name, or a path into a section (`roles.judge`)."""
    value: Any = ...
    above: float | None = None
    reason: str = ""
    """Why, if the names of the two knobs do not say it."""
    others: tuple[Needs, ...] = ()
    """Conditions each of which suffices too."""

    def __or__(self, other: Needs) -> Needs:
        return replace(self, others=(*self.others, other))

    def is_met(self, section: Section) -> bool:
        if any(other.is_met(section) for other in self.others):
            return True
        found = self.find(section)
        if self.above is not None:
            return found is not None and bool(found > self.above)
        if self.value is ...:
            return found not in (None, (), {})
        if isinstance(self.value, tuple):
            return found in self.value
        return self.value in found if isinstance(found, tuple) else bool(found == self.value)

    def find(self, section: Section) -> Any:
        """The value of the needed knob; None if its section is null."""
        value: Any = section
        for name in self.knob.split("."):
            value = None if value is None else getattr(value, name)
        return value

    def describe(self) -> str:
        """The condition as it stands in tables of knobs."""
        if self.others:
            return " or ".join(each.describe() for each in (replace(self, others=()), *self.others))
        if self.above is not None:
            return f"{self.knob} above {self.above:g}"
        if self.value is ...:
            return self.knob
        return f"no {self.knob}" if self.value is None else f"{self.knob}={format_value(self.value)}"

    def explain(self, section: Section) -> str:
        """Why the knob has no effect, and what to change."""
        found = self.find(section)
        without = f"without {self.knob}" if found in (None, (), {}) else f"with {self.knob}={format_value(found)}"
        advice = f"leave out {self.knob}" if self.value is None else f"set {self.describe()}"
        return f"has no effect {without}{f' ({self.reason})' if self.reason else ''}: {advice}"


@dataclass(frozen=True, slots=True)
class Unused:
    """Knobs of the section in the field, or of each section in it, that have no effect in this place."""

    knobs: tuple[str, ...]
    """Names, or paths into a section of it."""
    reason: str = ""
    unless: Needs | None = None
    """Condition on the section with the field, under which they have an effect."""

    def explain(self, section: Section) -> str:
        return f"has no effect: {self.reason}" if self.unless is None else self.unless.explain(section)


def format_value(value: Any) -> str:
    """A value as a file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "|".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) and value.is_integer() else str(value)


class Section(BaseModel):
    """A group of knobs; an unknown key is an error that suggests the nearest known key."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    later_knobs: ClassVar[tuple[str, ...]] = ()
    """Knobs that are written only if they are changed: digests of files that earlier versions wrote, which lack them,
    stay the same."""

    @model_validator(mode="before")
    @classmethod
    def _name_nearest_key(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for key in values:
            if key not in cls.model_fields:
                hint = suggest_name(str(key), list(cls.model_fields))
                raise PydanticCustomError("unknown_key", "unknown key {key}: {hint}", {"key": str(key), "hint": hint})
        return values

    @model_validator(mode="before")
    @classmethod
    def _refuse_booleans(cls, values: Any) -> Any:
        """A number, or a list or mapping of numbers, holds no booleans, which pydantic takes for 1 and 0."""
        for name in cls.model_fields.keys() & (values if isinstance(values, dict) else ()):
            types = set(list_types(cls.model_fields[name].annotation))
            if not types & {int, float} or bool in types:
                continue
            value = values[name]
            inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
            if any(isinstance(each, bool) for each in [value, *inner]):
                cause = "is a boolean where a number is expected (YAML reads yes, no, on and off as booleans)"
                raise ValueError(f"{name}={value} {cause}")
        return values

    @field_validator("*")
    @classmethod
    def _check_integer(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise ValueError(f"must be at most {MAX_INTEGER}, got {value}")
        return value

    @model_validator(mode="after")
    def _check_effects(self) -> Self:
        for name, field in type(self).model_fields.items():
            for condition in field.metadata:
                if isinstance(condition, Needs) and self.is_changed(name) and not condition.is_met(self):
                    raise ValueError(f"{self.show(name)} {condition.explain(self)}, or leave out {name}")
                if isinstance(condition, Unused) and not (condition.unless and condition.unless.is_met(self)):
                    for where, section in list_sections(name, getattr(self, name)):
                        section.refuse_knobs(condition.knobs, condition.explain(self), where=where)
        return self

    @model_serializer(mode="wrap")
    def _write(self, write: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        values: dict[str, Any] = write(self)
        return {name: each for name, each in values.items() if name not in self.later_knobs or self.is_changed(name)}

    def list_shared(self, kind: type[Section]) -> dict[str, Any]:
        """The knobs that another kind of section has too, with their values here."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in kind.model_fields}

    def is_changed(self, name: str) -> bool:
        """Whether a knob is neither at its default nor null."""
        value = getattr(self, name)
        return value is not None and bool(value != type(self).model_fields[name].get_default(call_default_factory=True))

    def show(self, name: str) -> str:
        """A knob with its value, or its name alone if the value is a section, a list or a mapping."""
        value = getattr(self, name)
        return name if isinstance(value, (Section, tuple, dict)) else f"{name}={format_value(value)}"

    def refuse_knobs(self, knobs: tuple[str, ...], explanation: str, *, where: str) -> None:
        """Raise a ValueError if one of the knobs is changed; `where` is the name of this section."""
        for path in knobs:
            name, dot, inner = path.partition(".")
            if dot:
                getattr(self, name).refuse_knobs((inner,), explanation, where=f"{where}.{name}")
            elif self.is_changed(name):
                raise ValueError(f"{where}.{self.show(name)} {explanation}, or leave out {name}")


class DataSection(Section):
    """A data set, or one split of it."""

    path: str
    """Folder of jsonl, json, csv or parquet files, one such file, or a hub id."""
    name: str | None = None
    """Configuration (subset) of a data set that has several."""
    split: str | None = "train"
    """Split to read."""


def list_sections(name: str, value: Section | Mapping[str, Section] | None) -> list[tuple[str, Section]]:
    """The sections that a field holds, with their names."""
    if value is None:
        return []
    return [(name, value)] if isinstance(value, Section) else [(f"{name}.{key}", each) for key, each in value.items()]


def list_types(annotation: Any) -> Iterator[type]:
    """The types of which an annotation is made; of a literal, those of its values."""
    if get_origin(annotation) is Literal:
        yield from map(type, get_args(annotation))
    elif inner := get_args(annotation):
        for each in inner:
            yield from list_types(each)
    elif isinstance(annotation, type):
        yield annotation


TASK_KNOBS = ("task_selector", "weight", "operators")
"""Knobs of a data set that choose or change tasks of training."""
ROLLOUT_KNOBS = ("max_staleness", "branching")
"""Knobs of `rollout` that only training has."""
