"""Load rows of conversations from disk, and split off held-out rows.

JSON Lines are parsed directly: `datasets` would add the fields of all rows to every row, which gives tool calls the
arguments of other tools as nulls. Rows of other formats are loaded by `datasets`, so their null fields are dropped.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tunesmith.config import ConversationDataSection
from tunesmith.errors import DataError
from tunesmith.tasks.data_path import SINGLE_SPLIT
from tunesmith.tasks.load import load_jsonl, load_rows

Row = Mapping[str, Any]
Item = TypeVar("Item")


def load_conversation_rows(section: ConversationDataSection) -> list[Row]:
    """All rows of a section's paths, in order."""
    rows: list[Row] = []
    for path in section.paths:
        file = find_jsonl_file(path, section.split)
        if file is not None and section.name is not None:
            raise DataError(f"name {section.name!r} has no effect: {path!r} has no configurations; remove name")
        if file == Path(path).expanduser() and section.split not in {None, SINGLE_SPLIT, file.stem}:
            raise DataError(
                f"split {section.split!r}: the file {path!r} is one split; leave split out, or give its folder"
            )
        if file is not None:
            rows += load_jsonl(file)
        else:
            loaded = load_rows(path, name=section.name, split=section.split)
            rows += [drop_empty_fields(row) for row in loaded]
    if not rows:
        raise DataError(f"there are no rows to train on in {', '.join(section.paths)}")
    return rows


def find_jsonl_file(path: str, split: str | None) -> Path | None:
    """The JSON Lines file at a path, or of the split in a folder; None if there is none."""
    root = Path(path).expanduser()
    file = root if root.suffix == ".jsonl" else root / f"{split}.jsonl"
    return file if file.is_file() else None


def drop_empty_fields(value: Any) -> Any:
    """Remove fields that are None from nested objects."""
    if isinstance(value, dict):
        return {key: drop_empty_fields(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [drop_empty_fields(inner) for inner in value]
    return value


def hold_out(items: Sequence[Item], fraction: float, *, seed: int) -> tuple[list[Item], list[Item]]:
    """Split items into training and held-out items, each in order; a fraction above 0 holds out at least one."""
    if fraction == 0:
        return list(items), []
    count = max(1, round(fraction * len(items)))
    if count >= len(items):
        raise DataError(f"eval_fraction={fraction:g} of {len(items)} rows leaves none to train on")
    chosen = set(random.Random(f"held-out-{seed}").sample(range(len(items)), count))
    return (
        [item for index, item in enumerate(items) if index not in chosen],
        [item for index, item in enumerate(items) if index in chosen],
    )
