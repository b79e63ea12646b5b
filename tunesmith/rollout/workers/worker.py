"""What the dispatcher asks of a worker, and what a worker counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, Protocol

from tunesmith.experience.finished_group import FinishedGroup
from tunesmith.rollout.branching.stats import BranchingStats
from tunesmith.rollout.group import GroupRequest
from tunesmith.rollout.progress import RolloutProgress
from tunesmith.types import Group

WindowState = Literal["sampling", "waiting", "idle"]
"""Of a worker whose engine steps in windows: within one, at its end, or without requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatistics:
    """Counters of a worker since it was last asked."""

    counters: Mapping[str, float]
    """Of its engine and of the sessions of its rollouts, by name."""
    branching: BranchingStats | None = None
    """Of a worker whose rollouts branch."""


class Worker(Protocol):
    """Runs groups. It keeps those that have finished until the dispatcher takes them."""

    rank: int

    @property
    def num_running(self) -> int: ...

    @property
    def finished(self) -> Sequence[int]:
        """Numbers of the groups to take."""

    @property
    def window(self) -> WindowState | None:
        """None: the engine steps whenever it has work."""

    async def open(self, progress: RolloutProgress, on_change: Callable[[], None]) -> None:
        """Make ready for a phase; the same task closes the worker. `progress` collects the trajectories that finish;
        `on_change` is called when a group has finished, a window has ended, or an error has occurred."""

    def raise_error(self) -> None:
        """Raise the error that ends the run, if one has occurred."""

    async def set_version(self, policy_version: int) -> list[int]:
        """Sample with the weights of this version; returns the numbers of groups that have become too old for it."""

    def start(self, requests: Sequence[GroupRequest]) -> None: ...

    def begin_window(self) -> None:
        """Let an engine that steps in windows make the next one."""

    def end_sampling(self) -> None:
        """Let an engine that steps in windows make no step until the next window."""

    def take(self, numbers: Sequence[int]) -> list[FinishedGroup]: ...

    async def fetch(self, numbers: Sequence[int]) -> list[Group]:
        """The whole groups of which references were taken; they stay with the worker."""

    def pause(self) -> None:
        """Stop sampling on a device that also trains."""

    async def evaluate(self, requests: Sequence[GroupRequest], *, policy_version: int) -> list[Group]:
        """Run other groups to their end, while groups in flight wait; what they count is forgotten."""

    async def take_statistics(self) -> WorkerStatistics: ...

    async def close(self) -> None:
        """Cancel what runs."""


def sum_counters(parts: Sequence[WorkerStatistics]) -> dict[str, float]:
    counters = [part.counters for part in parts]
    return {name: sum(part.get(name, 0.0) for part in counters) for name in dict.fromkeys(chain(*counters))}
