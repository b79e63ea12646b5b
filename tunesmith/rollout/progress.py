"""Finished rollouts of one phase: shown on a status line, and kept so that a phase that is aborted can be saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tunesmith.types import Trajectory


class StatusLine(Protocol):
    """Shows progress."""

    def show_status(self, text: str) -> None: ...


@dataclass(slots=True, kw_only=True)
class RolloutProgress:
    """Finished trajectories of one phase."""

    status: StatusLine | None = None
    name: str = "rollouts"
    """What the status line calls them."""
    finished: list[Trajectory] = field(default_factory=list)
    """Without baseline rollouts."""
    num_done: int = 0
    num_expected: int = 0

    def add(self, trajectories: Sequence[Trajectory], *, is_kept: bool = True) -> None:
        """Add trajectories; `is_kept`: whether a phase that is aborted saves them."""
        self.num_done += len(trajectories)
        if is_kept:
            self.finished += trajectories
        if self.status is not None:
            self.status.show_status(f"{self.num_done}/{self.num_expected} {self.name}")

    def show(self, text: str) -> None:
        """Show what follows the rollouts."""
        if self.status is not None:
            self.status.show_status(text)
