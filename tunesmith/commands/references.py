"""References of pipeline files: `stage:NAME` is a stage's model, `stage:NAME/FILE` a file that it wrote."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

REFERENCE = re.compile(r"stage:(?P<stage>[^/]+)(?:/(?P<file>.+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReference:
    """A reference to the output of an earlier stage."""

    stage: str
    file: str | None
    """Path within the stage's output; None for its model."""


def read_reference(text: str) -> StageReference | None:
    match = REFERENCE.fullmatch(text)
    return None if match is None else StageReference(stage=match["stage"], file=match["file"])


def list_strings(value: Any) -> list[str]:
    found: list[str] = []

    def collect(text: str) -> str:
        found.append(text)
        return text

    map_strings(value, collect)
    return found


def map_strings(value: Any, change: Callable[[str], Any]) -> Any:
    """Apply `change` to every string in nested values, but not to keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_strings(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(inner, change) for inner in value]
    return value
