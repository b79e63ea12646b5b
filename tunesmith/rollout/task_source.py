"""Which tasks of a round a process runs: those of a plan, or the next one whenever it has room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol


class TaskSource(Protocol):
    """Positions of tasks in their round; `taken` grows while the round runs."""

    taken: list[int]

    async def take(self) -> int | None:
        """The position of the next task; None if there is none."""

    def end_group(self) -> None:
        """A task that was taken is done."""


class PlannedTasks:
    """The positions of a plan."""

    def __init__(self, positions: Sequence[int]) -> None:
        self._positions = positions
        self.taken: list[int] = []

    async def take(self) -> int | None:
        if len(self.taken) == len(self._positions):
            return None
        self.taken.append(self._positions[len(self.taken)])
        return self.taken[-1]

    def end_group(self) -> None:
        return None


class TasksOnDemand:
    """Positions from a counter that all ranks share.

    A rank takes its fair share as soon as it has room, and one more task whenever one of its own is done, so a fast
    rank runs more tasks than one whose rollouts take long.
    """

    def __init__(self, take_next: Callable[[], int], *, num_tasks: int, num_ranks: int) -> None:
        self._take_next = take_next
        self._num_tasks = num_tasks
        self._fair = max(num_tasks // num_ranks, 1)
        self._num_done = 0
        self._has_room = asyncio.Event()
        self.taken: list[int] = []

    async def take(self) -> int | None:
        while len(self.taken) - self._num_done >= self._fair:
            self._has_room.clear()
            await self._has_room.wait()
        position = self._take_next()
        if position >= self._num_tasks:
            return None
        self.taken.append(position)
        return position

    def end_group(self) -> None:
        self._num_done += 1
        self._has_room.set()


async def take_all(source: TaskSource) -> list[int]:
    """All positions that a source hands out, which must not wait for groups to end."""
    while await source.take() is not None:
        pass
    return source.taken
