"""The interface of trackers, the description of a run that they receive, and their ids of it.

The id is saved in the run folder, so that a resumed run keeps it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tunesmith.storage import RunPaths, save_text, storage_errors


class Tracker(Protocol):
    """Logs metrics by step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, *, is_failed: bool) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The properties of a run that trackers need."""

    root: Path
    """The run folder, `<project>/<name>`."""
    committed_step: int | None = None
    """The step that a resumed run continues from; None for a new run."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Hyperparameters: dotted key -> value."""

    @property
    def project(self) -> str:
        return self.root.absolute().parent.name

    @property
    def name(self) -> str:
        return self.root.absolute().name


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted keys; an empty mapping stays a value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def load_run_id(root: Path, tracker: str) -> str | None:
    """The saved id, None if the run has not used this tracker."""
    path = RunPaths(root).tracker_id(tracker)
    if not path.exists():
        return None
    with storage_errors(path, "read"):
        return path.read_text(encoding="utf-8").strip() or None


def save_run_id(root: Path, tracker: str, run_id: str) -> None:
    save_text(RunPaths(root).tracker_id(tracker), f"{run_id}\n")


def choose_run_id(root: Path, tracker: str, *, is_resumed: bool) -> str:
    """The saved id if the run is resumed and has one, else a new id, which is saved."""
    saved = load_run_id(root, tracker) if is_resumed else None
    if saved is not None:
        return saved
    run_id = secrets.token_hex(8)
    save_run_id(root, tracker, run_id)
    return run_id
