"""Check of a data set path without importing `datasets`."""

from __future__ import annotations

from pathlib import Path

from tunesmith.errors import MissingDataError
from tunesmith.hub import is_path_like


def check_data_path(path: str) -> None:
    """Refuse a path that does not exist; a name that may be a hub id passes."""
    if not Path(path).expanduser().exists() and is_path_like(path):
        raise MissingDataError(f"the data set path {path!r} does not exist; give a folder, a file or a hub id")
