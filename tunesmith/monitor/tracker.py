"""What a tracker is, and what it needs to know of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


class Tracker(Protocol):
    """Keeps metrics by step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, *, is_failed: bool) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A run as trackers see it."""

    root: Path
    """The run folder: its name is the run's, its parent's the project's."""
    committed_step: int | None = None
    """The step that a resumed run continues from; None for a new run."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Dotted key -> value, as trackers list hyperparameters."""

    @property
    def project(self) -> str:
        return self.root.absolute().parent.name

    @property
    def name(self) -> str:
        return self.root.absolute().name
