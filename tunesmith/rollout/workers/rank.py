"""A worker on another rank: the messages, its end on the first rank, and its end on its own.

The first rank calls methods of `ServedWorker`, and a rank those of `RankWorker` that begin with `note`. The first rank
never waits for a collective meanwhile, so that the event loops of all ranks go on. Messages of a link arrive in the
order in which they were sent. Calls whose result is needed are answered, one after the other; nothing else is waited
for. A step of a run whose groups end with the step, on the link to one rank:

    first rank                                   rank

    set_version(3, None)                    ->   its engine samples with version 3
                                            <-   Answer([])
    start(requests number 13 and 15)        ->
                                            <-   note_finished(15, reference, cost)
                                            <-   note_finished(13, reference, cost)
    pause()                                 ->   its engine pauses
                                            <-   Answer(WorkerStatistics(...))

    (the update: both ranks take part in its collectives)

A rank that only samples receives the weights with `set_version`, sends whole groups, and is never paused.

Ranks that hold groups in flight on CPUs sample in windows of engine steps, so that they stop at a step and not at a
time: a rank whose window has ended waits until all others are at the end of theirs or have nothing to sample, and the
first rank begins the next windows, or ends the phase if enough groups have finished.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tunesmith.cluster.links import Call, Link
from tunesmith.experience.finished_group import FinishedGroup, PathCost, build_reference, measure_group
from tunesmith.experience.replay import find_oldest_version
from tunesmith.rollout.group import GroupRequest
from tunesmith.rollout.progress import RolloutProgress
from tunesmith.rollout.workers.group_runner import list_stale
from tunesmith.rollout.workers.local import LocalWorker
from tunesmith.rollout.workers.worker import WindowState, WorkerStatistics
from tunesmith.types import Group


class RankWorker:
    """A worker on another rank, on the first one."""

    def __init__(
        self,
        link: Link,
        rank: int,
        *,
        has_phases: bool = False,
        has_windows: bool = False,
        num_weights: int | None = None,
        max_staleness: int = 0,
    ) -> None:
        """`has_phases`: whether it samples between `begin_window` and `end_sampling` only, `has_windows`: in windows;
        `num_weights`: number of values that it receives with each version, of a rank that only samples: its groups age
        here once they have finished."""
        self.rank = rank
        self._progress = RolloutProgress()
        self._on_change: Callable[[], None] = lambda: None
        self._link = link
        self._num_weights = num_weights
        self._max_staleness = max_staleness
        self._has_phases = has_phases
        self._has_windows = has_windows
        self._window: WindowState = "idle"
        self._phase = 0
        self._version: int | None = None
        self._running: dict[int, GroupRequest] = {}
        self._finished: dict[int, FinishedGroup] = {}
        """Both by number."""
        self._statistics: asyncio.Future[WorkerStatistics] | None = None
        """Since the last pause."""
        self._error: Exception | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def only_samples(self) -> bool:
        return self._num_weights is not None

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def finished(self) -> Sequence[int]:
        return list(self._finished)

    @property
    def window(self) -> WindowState | None:
        return self._window if self._has_windows else None

    async def open(self, progress: RolloutProgress, on_change: Callable[[], None]) -> None:
        self._progress, self._on_change = progress, on_change
        await self._link.open()
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    async def set_version(self, policy_version: int) -> list[int]:
        dropped: list[int] = []
        # a rank that only samples goes on with weights that it has; one that trains was paused for the update
        if not self.only_samples or policy_version != self._version:
            self._version = policy_version
            dropped += await self._link.ask_for(ServedWorker.set_version, policy_version, self._num_weights)
        # groups that such a rank has sent are known only here, so they age here
        if self.only_samples:
            oldest_of = {number: find_oldest_version(each.group.scored) for number, each in self._finished.items()}
            dropped += list_stale(oldest_of, policy_version, self._max_staleness)
        for number in dropped:
            self._running.pop(number, None)
            self._finished.pop(number, None)
        return sorted(dropped)

    def start(self, requests: Sequence[GroupRequest]) -> None:
        self._running |= {request.number: request for request in requests}
        self._link.call(ServedWorker.start, requests)

    def begin_window(self) -> None:
        if self._has_phases:
            self._window = "sampling"
            self._link.call(ServedWorker.begin_window, self._phase)

    def end_sampling(self) -> None:
        """Windows that end after this are those of an earlier phase."""
        if self._has_phases:
            self._phase += 1
            self._link.call(ServedWorker.end_sampling)

    def take(self, numbers: Sequence[int]) -> list[FinishedGroup]:
        return [self._finished.pop(number) for number in numbers]

    async def fetch(self, numbers: Sequence[int]) -> list[Group]:
        return await self._link.ask_for(ServedWorker.fetch, numbers)

    def pause(self) -> None:
        """A rank that only samples goes on."""
        if not self.only_samples:
            self._statistics = self._link.ask_for(ServedWorker.pause)

    async def evaluate(self, requests: Sequence[GroupRequest], *, policy_version: int) -> list[Group]:
        groups = await self._link.ask_for(ServedWorker.evaluate, requests, policy_version)
        for group in groups:
            self._progress.add(group.trajectories, is_kept=False)
        return groups

    async def take_statistics(self) -> WorkerStatistics:
        counting, self._statistics = self._statistics or self._link.ask_for(ServedWorker.take_statistics), None
        return await counting

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self) -> None:
        try:
            while True:
                await self._link.carry_out(await self._link.receive(), self)
        except Exception as error:  # noqa: BLE001 - raised where the dispatcher waits
            self._error = error
            self._link.fail(error)
            self._on_change()

    def note_window(self, phase: int, window: WindowState) -> None:
        """A window has ended in the rank's phase `phase`."""
        if phase == self._phase:
            self._window = window
        self._on_change()

    def note_finished(self, number: int, sent: Group, cost: PathCost, *, has_tokens: bool) -> None:
        """A group has finished; of a reference, which has no tokens, the rank keeps the group."""
        request = self._running.pop(number)
        group = replace(sent, task=request.task).map(partial(replace, task=request.task))
        self._progress.add(group.trajectories, is_kept=has_tokens and request.is_trained)
        rank = 0 if self.only_samples else self.rank
        self._finished[number] = FinishedGroup(number=number, group=group, has_tokens=has_tokens, rank=rank, cost=cost)
        self._on_change()


class ServedWorker:
    """The worker of this rank, which follows the messages of the first one."""

    def __init__(
        self,
        worker: LocalWorker,
        link: Link,
        *,
        sends_tokens: bool,
        take_weights: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """`sends_tokens`: whether the first rank reads the tokens of a group before the update; `take_weights`
        overwrites the weights in place and raises if their number is another: of a rank that only samples."""
        self.kept: dict[int, Group] = {}
        """Groups that the first rank has references of, or that a step may train here, by number."""
        self._worker = worker
        self._link = link
        self._sends_tokens = sends_tokens
        self._take_weights = take_weights
        self._progress = RolloutProgress()
        self._untrained: set[int] = set()
        """Numbers of groups that no step trains."""
        self._phase = 0
        self._failed: asyncio.Future[Any] | None = None

    async def open(self) -> None:
        self._failed = asyncio.get_running_loop().create_future()
        self._failed.add_done_callback(lambda done: done.cancelled() or done.exception())
        await self._worker.open(self._progress, self._note_change)

    async def receive(self) -> Any:
        """The next message of the first rank; raises the error of a rollout."""
        assert self._failed is not None, "open() was called"
        receiving = asyncio.ensure_future(self._link.receive())
        try:
            await asyncio.wait({receiving, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not receiving.done():
                receiving.cancel()
        return self._failed.result() if self._failed.done() else receiving.result()

    async def follow(self, call: Call) -> None:
        """Do what the first rank asks for."""
        await self._link.carry_out(call, self)

    async def set_version(self, policy_version: int, num_weights: int | None) -> list[int]:
        """Drop groups that are too old for a step of this version, and sample with its weights; returns the numbers of
        the dropped ones. `num_weights`: number of values that the first rank sends now, in a collective; None: this
        rank has the weights. New weights are written between two steps of the engine; workflows continue."""
        if self._take_weights is not None:
            assert num_weights is not None
            self._worker.pause()
            await self._take_weights(num_weights)
        return await self._worker.set_version(policy_version) + self._drop_kept(policy_version)

    async def start(self, requests: Sequence[GroupRequest]) -> None:
        self._untrained |= {each.number for each in requests if not each.is_trained}
        self._worker.start(requests)

    async def begin_window(self, phase: int) -> None:
        """`phase`: phases of sampling before this one."""
        self._phase = phase
        self._worker.begin_window()

    async def end_sampling(self) -> None:
        """Make no step until the next window."""
        self._worker.end_sampling()

    async def pause(self) -> WorkerStatistics:
        """Stop sampling."""
        self._worker.pause()
        return await self.take_statistics()

    async def evaluate(self, requests: Sequence[GroupRequest], policy_version: int) -> list[Group]:
        return await self._worker.evaluate(requests, policy_version=policy_version)

    async def fetch(self, numbers: Sequence[int]) -> list[Group]:
        """These kept groups, although no update follows."""
        return [self.kept[number] for number in numbers]

    async def take_statistics(self) -> WorkerStatistics:
        return await self._worker.take_statistics()

    async def close(self) -> None:
        await self._worker.close()

    def _drop_kept(self, policy_version: int) -> list[int]:
        """Forget kept groups that are too old, unless a step has trained them already; returns their numbers."""
        oldest_of = {number: find_oldest_version(group.scored) for number, group in self.kept.items()}
        dropped = list_stale(oldest_of, policy_version, self._worker.max_staleness)
        for number in dropped:
            del self.kept[number]
        return dropped

    def _note_change(self) -> None:
        """Report groups that have finished and the end of a window."""
        assert self._failed is not None
        try:
            self._worker.raise_error()
            for finished in self._worker.take(self._worker.finished):
                self._report(finished.number, finished.group)
            if self._worker.window in ("waiting", "idle"):
                self._link.call(RankWorker.note_window, self._phase, self._worker.window)
        except BaseException as error:  # noqa: BLE001 - raised by `receive`
            if not self._failed.done():
                self._failed.set_exception(error)

    def _report(self, number: int, group: Group) -> None:
        has_tokens = self._sends_tokens and number not in self._untrained
        sent = group if has_tokens else build_reference(group)
        if self._take_weights is None and number not in self._untrained:
            self.kept[number] = group
        self._untrained.discard(number)
        # the first rank saves what an aborted phase has finished; here it would pile up
        self._progress.finished.clear()
        self._link.call(RankWorker.note_finished, number, sent, measure_group(group), has_tokens=has_tokens)
