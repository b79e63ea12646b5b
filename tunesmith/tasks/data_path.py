"""What the path of a data set may be, and what is there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tunesmith.errors import MissingDataError
from tunesmith.hub import is_path_like

FORMATS: Mapping[str, str] = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
"""Endings of files -> what reads them in `datasets`."""
SINGLE_SPLIT = "train"
"""The split name that `datasets` gives to a data set without splits."""


def check_data_path(path: str, *, knob: str = "path") -> None:
    """Refuse a path that does not exist; a name that may be a hub id passes."""
    if not path or (not Path(path).expanduser().exists() and is_path_like(path)):  # Path("") is the working folder
        raise MissingDataError(f"the data set {knob}={path!r} does not exist; give a folder, a file or a hub id")


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote the folder, of a `Dataset` or a `DatasetDict`."""
    return any((folder / file).is_file() for file in ("state.json", "dataset_dict.json"))
