"""Groups in flight: more than a step needs, so that a step waits for the first complete ones and not for the slowest.

`take` returns complete groups, in the order of their start; the others continue under the next weights. A group whose
oldest token would be trained more than `max_staleness` steps after it was sampled is dropped, and its task runs again.
A *site* is where groups run: this process (`OwnGroups`), all ranks, or ranks that only sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from tunesmith.rollout.actors import RolloutProgress
from tunesmith.rollout.in_flight.own_groups import InFlightLimits
from tunesmith.rollout.in_flight.running_group import StartedGroup
from tunesmith.tasks.task_feed import TaskFeed
from tunesmith.types import Group

T = TypeVar("T")


class GroupSite(Protocol):
    """Where the groups in flight run; see `OwnGroups`."""

    progress: RolloutProgress

    @property
    def num_waiting(self) -> int:
        """Complete groups that no step has taken."""

    def resume(self, policy_version: int) -> None: ...

    def pause(self) -> None: ...

    async def settle(self) -> list[int]: ...

    async def run(self, started: Sequence[StartedGroup], num_groups: int) -> list[int]: ...

    async def take(self, numbers: Sequence[int]) -> list[Group]: ...

    async def run_beside(self, work: Callable[[], T]) -> T: ...

    async def train(self, update: Callable[[], T], *, policy_version: int) -> T: ...

    def held(self) -> AbstractAsyncContextManager[None]: ...

    def compute_metrics(self) -> dict[str, float]: ...

    async def close(self) -> None: ...


class InFlightGroups:
    """The groups in flight of a run."""

    def __init__(self, site: GroupSite, feed: TaskFeed, limits: InFlightLimits) -> None:
        self._site = site
        self._feed = feed
        self._limits = limits
        self._index_of: dict[int, int] = {}
        """Index of the task among the training tasks, by number of the group."""
        self._num_started = 0
        self._num_requeued = 0
        """Tasks of a resumed run whose rollouts were in flight."""
        self._counts = {"num_dropped_groups": 0, "num_overtaking_groups": 0}

    @property
    def num_in_flight(self) -> int:
        """Groups that run, and complete ones that no step has taken."""
        return len(self._index_of)

    def resume(self, policy_version: int) -> None:
        """Continue sampling, with the current weights; groups that became too old are dropped."""
        self._site.resume(policy_version)

    def pause(self) -> None:
        """Stop sampling on the devices of trainers."""
        self._site.pause()

    async def take(self, num_groups: int, *, step: int, progress: RolloutProgress | None = None) -> list[Group]:
        """Wait until this many groups are complete; returns those that were started first, in this order.

        `progress` collects the trajectories that finish in this step.
        """
        self._site.progress = RolloutProgress() if progress is None else progress
        self._requeue(await self._site.settle())
        complete = await self._site.run(self._fill(self._limits.count_groups(num_groups, step=step)), num_groups)
        numbers = sorted(complete)[:num_groups]
        groups = await self._site.take(numbers)
        self._feed.add_selected([self._index_of.pop(number) for number in numbers])
        oldest = min(self._index_of, default=self._num_started)
        self._counts["num_overtaking_groups"] += sum(number > oldest for number in numbers)
        return groups

    async def run_beside(self, work: Callable[[], T]) -> T:
        """Run blocking work in a thread, while workflows continue; a cancellation waits for its end."""
        return await self._site.run_beside(work)

    async def train(self, update: Callable[[], T], *, policy_version: int) -> T:
        """Run the update that makes the weights of `policy_version`, while workflows continue."""
        return await self._site.train(update, policy_version=policy_version)

    def held(self) -> AbstractAsyncContextManager[None]:
        """Let other rollouts have the engine: model calls of the groups in flight wait, their tools do not."""
        return self._site.held()

    async def close(self) -> int:
        """Cancel everything in flight; returns the number of groups."""
        num_cancelled = self.num_in_flight
        self._index_of.clear()
        await self._site.close()
        return num_cancelled

    def compute_metrics(self) -> dict[str, float]:
        """Groups in flight now, and what happened since the last call."""
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        numbers = counts | {
            "num_in_flight": self.num_in_flight,
            "num_waiting_groups": self._site.num_waiting,
            "num_requeued_tasks": self._num_requeued,
        }
        self._num_requeued = 0
        return {f"staleness/{name}": float(number) for name, number in numbers.items()} | self._site.compute_metrics()

    def state_dict(self) -> dict[str, Any]:
        """The tasks in flight, which run again when the run is resumed; their rollouts are not saved."""
        indices = [self._index_of[number] for number in sorted(self._index_of)]
        return {"num_started": self._num_started, "tasks": indices + self._feed.requeued}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._num_started = state["num_started"]
        self._num_requeued = len(state["tasks"])
        self._feed.requeue(state["tasks"])

    def _fill(self, num_groups: int) -> list[StartedGroup]:
        """Groups to start, so that there are this many in flight."""
        started = []
        for index in self._feed.draw(max(num_groups - self.num_in_flight, 0)):
            started.append(StartedGroup(number=self._num_started, task=self._feed.tasks[index]))
            self._index_of[self._num_started] = index
            self._num_started += 1
        return started

    def _requeue(self, dropped: Sequence[int]) -> None:
        """Let the tasks of dropped groups run again."""
        self._feed.requeue([self._index_of.pop(number) for number in sorted(dropped)])
        self._counts["num_dropped_groups"] += len(dropped)


def describe_requeued(feed: TaskFeed, *, num_shown: int = 5) -> str | None:
    """The console line of a resumed run whose last checkpoint had rollouts in flight; None if it had none."""
    names = [feed.tasks[index].task_id for index in feed.requeued]
    if not names:
        return None
    return f"{len(names)} groups in flight were dropped; their tasks run again: {join_names(names, num_shown)}"


def join_names(names: Sequence[str], num_shown: int) -> str:
    rest = len(names) - num_shown
    return ", ".join(names[:num_shown]) + (f" and {rest} more" if rest > 0 else "")
