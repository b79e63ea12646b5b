"""References of pipeline files: `stage:NAME` is a stage's model, `stage:NAME/FILE` a file that it wrote."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tunesmith.runs.load_config import map_strings

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
    map_strings(value, found.append)
    return found
