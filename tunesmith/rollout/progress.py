"""Finished rollouts of one phase: shown on a status line, and kept so that a phase that is aborted can be saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tunesmith.types import Trajectory

Show = Callable[[str], None]
"""Shows a text on a status line."""


def show_nothing(text: str) -> None:
    """There is no status line."""


@dataclass(slots=True, kw_only=True)
class RolloutProgress:
    """Finished trajectories of one phase."""

    show: Show = show_nothing
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
        self.show(f"{self.num_done}/{self.num_expected} {self.name}")
