"""Groups in flight on several ranks that sample and train together.

Each rank holds its own groups in flight. The first rank draws tasks, assigns groups to ranks, and stops the sampling of
all ranks when enough groups are complete; complete groups that a step takes are handed to it as after a round of
rollouts. Between phases ranks wait for its orders in a thread, so their workflows go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tunesmith.cluster.links import Links
from tunesmith.errors import RankError
from tunesmith.experience.path_cost import measure_group
from tunesmith.rollout.actors import Actors, RolloutProgress
from tunesmith.rollout.in_flight.own_groups import OwnGroups
from tunesmith.rollout.in_flight.rank_sampling import (
    OpenClock,
    RankSampling,
    SamplingPhase,
    SamplingReport,
    list_complete,
)
from tunesmith.rollout.in_flight.running_group import StartedGroup
from tunesmith.rollout.rank_shares import RankShare
from tunesmith.types import Group

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingAnswer:
    """What the first rank answers to reports: sample on, or stop."""

    phase: int
    is_stop: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeOrder:
    """Drop groups that are too old for a step of this version, and report the others."""

    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """Start groups, and sample until the first rank says stop."""

    started: Mapping[int, Sequence[StartedGroup]]
    """By rank."""
    phase: int | None
    """As in `SamplingReport`; None: enough groups are complete without sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOrder:
    """Hand complete groups to the first rank."""

    number: int
    """Number of rounds of this process before it."""
    numbers: Mapping[int, Sequence[int]]
    """Numbers of the groups, by rank."""


GroupOrder = ResumeOrder | SampleOrder | TakeOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport:
    """A rank's groups before a step."""

    dropped: Sequence[int]
    complete: Sequence[int]


class RankMember:
    """This rank's groups in flight, and how they follow the orders of the first rank; one on each rank."""

    def __init__(
        self, actors: Actors, own: OwnGroups, links: Links, *, open_clock: OpenClock, timeout_s: float
    ) -> None:
        """`timeout_s`: as `RankSampling`."""
        self.actors = actors
        self.own = own
        self.links = links
        self.sampling_s = 0.0
        """Seconds of sampling since the last groups were taken."""
        self._open_clock = open_clock
        self._timeout_s = timeout_s
        self._sampling: RankSampling | None = None
        self._reading: list[asyncio.Task[None]] = []

    @property
    def sampling(self) -> RankSampling:
        assert self._sampling is not None, "open() was called"
        return self._sampling

    async def open(
        self,
        report: Callable[[SamplingReport], None] | None = None,
        on_report: Callable[[int, SamplingReport], None] | None = None,
    ) -> None:
        """Open the links, once; on the first rank with what takes its own reports and those of others."""
        if self._sampling is not None:
            return
        for link in self.links.by_rank.values():
            await link.open()
        send = report or self.links.first.send
        self._sampling = RankSampling(self.own, self._open_clock, send, timeout_s=self._timeout_s)
        self._sampling.clock.stop()
        await self.own.open()
        reading = (
            [self._read_answers()] if on_report is None else [self._read(r, on_report) for r in self.links.by_rank]
        )
        self._reading = [asyncio.create_task(each) for each in reading]

    async def carry_out(self, order: GroupOrder) -> None:
        """Follow an order of the first rank, on another one."""
        await self.open()
        match order:
            case ResumeOrder():
                await self.resume(order)
            case SampleOrder():
                await self.sample(order)
            case TakeOrder():
                await self.take(order)

    async def resume(self, order: ResumeOrder) -> list[ResumeReport] | None:
        """The reports of all ranks on the first one, None on the others."""
        self.sampling.clock.stop()
        self.own.resume(order.policy_version)
        report = ResumeReport(dropped=await self.own.settle(), complete=sorted(self.own.complete))
        return await self.own.run_beside(partial(self.actors.ranks.gather_objects, report))

    async def sample(self, order: SampleOrder) -> None:
        self.own.start(order.started[self.actors.ranks.rank])
        if order.phase is not None:
            started = time.perf_counter()
            await self.sampling.run(order.phase)
            self.sampling_s += time.perf_counter() - started

    async def take(self, order: TakeOrder) -> list[RankShare] | None:
        """The groups of all ranks on the first one, None on the others."""
        actors, numbers = self.actors, order.numbers[self.actors.ranks.rank]
        groups = await self.own.take(numbers)
        actors.ledger.keep(order, numbers, groups)
        is_first = actors.ranks.is_first
        share = RankShare(
            groups=[] if is_first else groups,
            positions=numbers,
            costs=[measure_group(group) for group in groups],
            engine_stats={} if is_first else actors.engine.compute_stats(),
            recorder_stats={} if is_first else actors.service.recorder.compute_stats(),
            rollout_s=self.sampling_s,
        )
        self.sampling_s = 0.0
        return await self.own.run_beside(partial(actors.ranks.gather_objects, share))

    def answer(self, answer: SamplingAnswer) -> None:
        """Follow an answer of the first rank."""
        if answer.is_stop:
            self.sampling.stop(answer.phase)
        else:
            self.sampling.begin_window(answer.phase)

    def pause(self) -> None:
        """Pause the engines, before an update or before other rollouts."""
        self.own.pause()
        if self._sampling is not None:
            self._sampling.clock.release()

    def held(self) -> AbstractAsyncContextManager[None]:
        return self.own.held()

    async def close(self) -> None:
        for task in self._reading:
            task.cancel()
        if self._sampling is not None:
            self._sampling.clock.release()
        await self.own.close()
        for link in self.links.by_rank.values():
            await link.close()

    async def _read_answers(self) -> None:
        """Read what the first rank answers."""
        try:
            while True:
                self.answer(await self.links.first.receive())
        except RankError as error:
            self.sampling.fail(error)

    async def _read(self, rank: int, on_report: Callable[[int, SamplingReport], None]) -> None:
        """Read the reports of another rank, on the first one."""
        try:
            while True:
                on_report(rank, await self.links.by_rank[rank].receive())
        except RankError as error:
            self.sampling.fail(error)


class RankGroups:
    """The groups in flight of all ranks, on the first one, which is one of them."""

    def __init__(self, member: RankMember, *, is_balanced: bool) -> None:
        """`is_balanced`: as `rollout.assignment: balanced`."""
        self._member = member
        self._ranks = member.actors.ranks
        self._is_balanced = is_balanced
        self._rank_of: dict[int, int] = {}
        """The rank that runs a group, by its number."""
        self._complete: dict[int, Sequence[int]] = dict.fromkeys(range(self._ranks.world_size), ())
        self._phase = SamplingPhase(number=-1, num_needed=0, complete=self._complete, has_windows=False)
        self._num_phases = 0
        self._next_version: int | None = None
        """The version of a step that has begun, until all ranks have resumed."""

    @property
    def progress(self) -> RolloutProgress:
        return self._member.own.progress

    @progress.setter
    def progress(self, value: RolloutProgress) -> None:
        self._member.own.progress = value

    @property
    def num_waiting(self) -> int:
        return len(list_complete(self._complete))

    def resume(self, policy_version: int) -> None:
        """Begin a step; the ranks resume together in `settle`."""
        self._next_version = policy_version

    def pause(self) -> None:
        """Stop sampling on this rank; the others pause when they train."""
        self._member.pause()

    async def settle(self) -> list[int]:
        """As `OwnGroups.settle`."""
        await self._member.open(partial(self._add_report, 0), self._add_report)
        if self._next_version is None:
            return []
        order, self._next_version = ResumeOrder(policy_version=self._next_version), None
        await self._send(order)
        reports = await self._member.resume(order)
        assert reports is not None, "this is the first rank"
        self._complete = {rank: report.complete for rank, report in enumerate(reports)}
        dropped = sorted(number for report in reports for number in report.dropped)
        for number in dropped:
            del self._rank_of[number]
        return dropped

    async def run(self, started: Sequence[StartedGroup], num_groups: int) -> list[int]:
        """As `OwnGroups.run`."""
        assigned: dict[int, list[StartedGroup]] = {rank: [] for rank in self._complete}
        for group in started:
            self._rank_of[group.number] = self._assign(group.number)
            assigned[self._rank_of[group.number]].append(group)
        has_enough = self.num_waiting >= num_groups
        order = SampleOrder(started=assigned, phase=None if has_enough else self._num_phases)
        if order.phase is not None:
            self._num_phases += 1
            self._phase = SamplingPhase(
                number=order.phase,
                num_needed=num_groups,
                complete=self._complete,
                has_windows=self._member.sampling.clock.has_windows,
            )
        await self._send(order)
        await self._member.sample(order)
        return list_complete(self._complete)

    async def take(self, numbers: Sequence[int]) -> list[Group]:
        """As `OwnGroups.take`."""
        ledger, started = self._member.actors.ledger, time.perf_counter()
        taken: dict[int, list[int]] = {rank: [] for rank in self._complete}
        for number in sorted(numbers):
            taken[self._rank_of.pop(number)].append(number)
        for rank, own in taken.items():
            self._complete[rank] = [number for number in self._complete[rank] if number not in own]
        order = TakeOrder(number=ledger.num_rounds, numbers=taken)
        await self._send(order)
        shares = await self._member.take(order)
        assert shares is not None, "this is the first rank"
        ledger.exchange_s += time.perf_counter() - started
        self.progress.finished += [run for share in shares[1:] for group in share.groups for run in group.trajectories]
        return ledger.add_round(order, shares)

    async def run_beside(self, work: Callable[[], T]) -> T:
        return await self._member.own.run_beside(work)

    async def train(self, update: Callable[[], T], *, policy_version: int) -> T:
        return await self._member.own.train(update, policy_version=policy_version)

    def held(self) -> AbstractAsyncContextManager[None]:
        """As `OwnGroups.held`; the other ranks hold theirs when they are asked for other rollouts."""
        return self._member.held()

    def compute_metrics(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        """Cancel what is in flight on this rank; the others do so at the end of the run."""
        await self._member.close()

    def _assign(self, number: int) -> int:
        """The rank that runs a group: by its number, or the one with the fewest groups in flight."""
        if not self._is_balanced:
            return number % self._ranks.world_size
        in_flight = list(self._rank_of.values())
        return min(self._complete, key=lambda rank: (in_flight.count(rank), rank))

    async def _send(self, order: GroupOrder) -> None:
        await self.run_beside(partial(self._ranks.broadcast_object, order))

    def _add_report(self, rank: int, report: SamplingReport) -> None:
        """Stop all ranks if enough groups are complete; else let those sample on that wait for others."""
        phase = self._phase
        self._member.sampling.note_report()
        if report.phase != phase.number or phase.has_ended:
            return  # sent before the rank knew that the phase had ended
        phase.add(rank, report)
        ranks = list(self._complete) if phase.has_ended else phase.begin_windows()
        answer = SamplingAnswer(phase=phase.number, is_stop=phase.has_ended)
        for each in ranks:
            if each == 0:
                self._member.answer(answer)
            else:
                self._member.links.by_rank[each].send(answer)
