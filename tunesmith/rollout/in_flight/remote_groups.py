"""Groups in flight on ranks that only sample, as the first of the ranks that train sees them.

Samplers go on while trainers update. Complete groups arrive whenever they are; at most those of `max_staleness` steps
are in flight during an update, so samplers never run further ahead. After each update the samplers take the new
weights. A group is dropped by its sampler while it runs, and here once it is complete.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from tunesmith.cluster.links import Links, build_silence_error
from tunesmith.errors import RankError
from tunesmith.experience.staleness import find_oldest_version
from tunesmith.rollout.actors import RolloutProgress
from tunesmith.rollout.in_flight.running_group import StartedGroup
from tunesmith.rollout.in_flight.sampling_rank import (
    CompleteGroup,
    EndSampling,
    RoundDone,
    StartGroups,
    TakeWeights,
    WeightsTaken,
)
from tunesmith.rollout.in_flight.work_thread import WorkThread
from tunesmith.rollout.rank_shares import RankLedger, RolloutOrder
from tunesmith.types import Group

T = TypeVar("T")


class RemoteGroups:
    """The groups in flight of a run whose samplers are other ranks; also runs rounds of tasks on them."""

    def __init__(
        self,
        links: Links,
        ledger: RankLedger,
        *,
        send_weights: Callable[[], None],
        num_elements: int,
        max_staleness: int,
        is_balanced: bool,
        timeout_s: float,
        prepare_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """`send_weights` sends the current weights, of `num_elements` in all, to the samplers, in a thread.

        The samplers' counters are added to `ledger`. `is_balanced`: as `rollout.assignment: balanced`;
        `timeout_s`: longest time without a message while it waits for one.
        """
        self._links = links.by_rank
        self._ledger = ledger
        self._send_weights = send_weights
        self._num_elements = num_elements
        self._max_staleness = max_staleness
        self._is_balanced = is_balanced
        self._timeout_s = timeout_s
        self._thread = WorkThread(prepare_thread)
        self.progress = RolloutProgress()
        self._rank_of: dict[int, int] = {}
        """The sampler that runs or has run a group, by its number."""
        self._complete: dict[int, Group] = {}
        self._dropped: list[int] = []
        self._version = 0
        """That the next step trains with."""
        self._sent_version: int | None = None
        self._answers: dict[int, WeightsTaken | RoundDone] = {}
        """Of each sampler to the last question."""
        self._weights_s = 0.0
        self._error: RankError | None = None
        self._changed = asyncio.Event()
        self._reading: list[asyncio.Task[None]] = []

    @property
    def num_ranks(self) -> int:
        return len(self._links)

    @property
    def num_waiting(self) -> int:
        return len(self._complete)

    def resume(self, policy_version: int) -> None:
        """Begin a step that trains with this version."""
        self._version = policy_version

    def pause(self) -> None:
        """Nothing to do: samplers have devices of their own."""

    async def settle(self) -> list[int]:
        """As `OwnGroups.settle`."""
        await self._prepare(self._version)
        for number, group in list(self._complete.items()):
            oldest = find_oldest_version(group.scored)
            if oldest is not None and self._version - oldest > self._max_staleness:
                del self._complete[number], self._rank_of[number]
                self._dropped.append(number)
        dropped, self._dropped = self._dropped, []
        return dropped

    async def run(self, started: Sequence[StartedGroup], num_groups: int) -> list[int]:
        """As `OwnGroups.run`."""
        assigned: dict[int, list[StartedGroup]] = {rank: [] for rank in self._links}
        for group in started:
            self._rank_of[group.number] = self._assign(group.number)
            assigned[self._rank_of[group.number]].append(group)
        for rank, own in assigned.items():
            if own:
                self._links[rank].send(StartGroups(started=own))
        await self._wait_until(lambda: len(self._complete) >= num_groups)
        return list(self._complete)

    async def take(self, numbers: Sequence[int]) -> list[Group]:
        """As `OwnGroups.take`."""
        for number in numbers:
            del self._rank_of[number]
        return [self._complete.pop(number) for number in numbers]

    async def run_beside(self, work: Callable[[], T]) -> T:
        return await self._thread.run(work)

    async def train(self, update: Callable[[], T], *, policy_version: int) -> T:
        """Run the update that makes the weights of `policy_version`, which the samplers then take."""
        result = await self._thread.run(update)
        await self._prepare(policy_version)
        return result

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Other rounds of tasks run on the samplers, which hold their groups meanwhile."""
        yield

    async def run_round(self, order: RolloutOrder, progress: RolloutProgress) -> list[Group]:
        """Run a round of tasks, split over the samplers, while the groups in flight wait."""
        await self._prepare(order.policy_version)
        groups: dict[int, Group] = {}
        for answer in await self._ask(order):
            assert isinstance(answer, RoundDone)
            groups |= dict(zip(answer.positions, answer.groups, strict=True))
        progress.finished += [run for group in groups.values() for run in group.trajectories]
        return [groups[position] for position in sorted(groups)]

    def compute_metrics(self) -> dict[str, float]:
        weights_s, self._weights_s = self._weights_s, 0.0
        return {"cluster/num_sampling_ranks": float(self.num_ranks), "perf/weights_s": weights_s}

    async def close(self) -> None:
        """Let the samplers end."""
        for task in self._reading:
            task.cancel()
        for link in self._links.values():
            if self._reading and self._error is None:
                link.send(EndSampling())
            await link.close()
        self._thread.close()

    async def _prepare(self, policy_version: int) -> None:
        """Open the links, and let the samplers have the current weights, which are of this version."""
        if not self._reading:
            for link in self._links.values():
                await link.open()
            self._reading = [asyncio.create_task(self._read(rank)) for rank in self._links]
        if policy_version == self._sent_version:
            return
        started = time.perf_counter()
        question = TakeWeights(policy_version=policy_version, num_elements=self._num_elements)
        for answer in await self._ask(question, work=self._send_weights):
            assert isinstance(answer, WeightsTaken)
            self._ledger.add_stats(engine=answer.engine_stats, recorder=answer.recorder_stats)
            for number in answer.dropped:
                del self._rank_of[number]
                self._dropped.append(number)
        self._sent_version = policy_version
        self._weights_s += time.perf_counter() - started

    async def _ask(
        self, question: TakeWeights | RolloutOrder, work: Callable[[], None] | None = None
    ) -> list[WeightsTaken | RoundDone]:
        """The answers of all samplers; `work` is done meanwhile."""
        self._answers.clear()
        for link in self._links.values():
            link.send(question)
        if work is not None:
            await self._thread.run(work)
        await self._wait_until(lambda: len(self._answers) == len(self._links))
        return [self._answers[rank] for rank in self._links]

    async def _wait_until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            if self._error is not None:
                raise self._error
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), self._timeout_s)
            except TimeoutError:
                raise build_silence_error(self._timeout_s) from None

    async def _read(self, rank: int) -> None:
        """Read what a sampler sends."""
        try:
            while True:
                self._take_message(rank, await self._links[rank].receive())
                self._changed.set()
        except RankError as error:
            self._error = error
            self._changed.set()

    def _take_message(self, rank: int, message: CompleteGroup | WeightsTaken | RoundDone) -> None:
        if not isinstance(message, CompleteGroup):
            self._answers[rank] = message
            return
        self._complete[message.number] = message.group
        self.progress.finished += message.group.trajectories
        if self.progress.status is not None:
            self.progress.status.show_status(f"{len(self._complete)} groups complete of {len(self._rank_of)}")

    def _assign(self, number: int) -> int:
        """The sampler that runs a group: by its number, or the one with the fewest groups that are not complete."""
        ranks = list(self._links)
        if not self._is_balanced:
            return ranks[number % len(ranks)]
        running = [rank for number, rank in self._rank_of.items() if number not in self._complete]
        return min(ranks, key=lambda rank: (running.count(rank), rank))
