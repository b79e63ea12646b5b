"""The interface of trackers, and the description of a run that they receive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


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
