"""Base class and field types shared by all config sections."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

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


class Section(BaseModel):
    """A group of knobs; an unknown key is an error that suggests the nearest known key."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _name_nearest_key(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for key in values:
            if key not in cls.model_fields:
                close = difflib.get_close_matches(str(key), cls.model_fields, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(cls.model_fields)}"
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


def refuse_knobs(section: Section, knobs: Sequence[str], *, where: str, reason: str) -> None:
    """Raise a ValueError if one of the knobs has another value than its default."""
    for key in knobs:
        if getattr(section, key) != type(section).model_fields[key].default:
            raise ValueError(f"{where}.{key} has no effect: {reason}")
