"""A rank that only samples: it runs groups that the first rank starts, and takes new weights between two steps.

Complete groups are sent to the first rank at once. For new weights the engine pauses, the parameters are overwritten in
place, and sampling resumes with the new version. The rank follows the messages of the first one until the run ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tunesmith.cluster.links import Link, build_silence_error
from tunesmith.errors import RankError
from tunesmith.rollout.actors import Actors, RolloutProgress, run_own_tasks
from tunesmith.rollout.in_flight.own_groups import OwnGroups
from tunesmith.rollout.in_flight.running_group import StartedGroup
from tunesmith.rollout.rank_shares import RolloutOrder, merge_rank_stats
from tunesmith.rollout.task_source import PlannedTasks
from tunesmith.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class StartGroups:
    """Put groups in flight."""

    started: Sequence[StartedGroup]


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeWeights:
    """Take the weights of this version, which the first rank sends now."""

    policy_version: int
    num_elements: int
    """Of all parameters that are sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSampling:
    """The run ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteGroup:
    """A group whose rollouts have ended, with its number."""

    number: int
    group: Group


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsTaken:
    """The answer to `TakeWeights`."""

    policy_version: int
    dropped: Sequence[int]
    """Numbers of groups that have become too old."""
    engine_stats: Mapping[str, float]
    recorder_stats: Mapping[str, float]
    """Counters since the last answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDone:
    """The answer to a `RolloutOrder`."""

    positions: Sequence[int]
    groups: Sequence[Group]


class SamplingRank:
    """Follows the messages of the first rank on one that only samples."""

    def __init__(
        self, actors: Actors, own: OwnGroups, link: Link, *, take_weights: Callable[[int], None], timeout_s: float
    ) -> None:
        """`actors.ranks` is this rank's place among those that sample; `take_weights` overwrites the weights in place,
        in a thread, and raises if their number of elements is another; `timeout_s`: longest time in which neither a
        message comes nor a group is complete."""
        self._actors = actors
        self._own = own
        self._link = link
        self._take_weights = take_weights
        self._timeout_s = timeout_s
        self._num_sent = 0
        """Complete groups so far."""
        self._stats: list[tuple[Mapping[str, float], Mapping[str, float]]] = []
        """Counters of the engine and the recorder that have not been sent."""
        self._failed: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Follow messages until the run ends; raises the error of a rollout, or that the first rank has ended."""
        await self._link.open()
        await self._own.open()
        self._failed = asyncio.get_running_loop().create_future()
        self._own.on_change = self._note_change
        try:
            while not isinstance(message := await self._receive(), EndSampling):
                await self._follow(message)
        finally:
            self._failed.cancel()
            await self._own.close()
            await self._link.close()

    async def _receive(self) -> object:
        receiving = asyncio.ensure_future(self._link.receive())
        assert self._failed is not None
        ending, num_sent, done = {receiving, self._failed}, -1, set[asyncio.Future[object]]()
        try:
            while not done and num_sent != self._num_sent:
                num_sent = self._num_sent
                done, _ = await asyncio.wait(ending, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not receiving.done():
                receiving.cancel()
        if self._failed.done():
            self._failed.result()
        if not done:
            raise build_silence_error(self._timeout_s)
        return receiving.result()

    async def _follow(self, message: object) -> None:
        match message:
            case StartGroups():
                self._own.start(message.started)
            case TakeWeights():
                await self._change_weights(message)
            case RolloutOrder():
                await self._run_round(message)
            case _:
                raise RankError(f"a sampling rank received {type(message).__name__}, which it does not know")

    async def _change_weights(self, message: TakeWeights) -> None:
        """Between two steps of the engine; workflows continue."""
        self._own.pause()
        await self._own.run_beside(lambda: self._take_weights(message.num_elements))
        self._own.resume(message.policy_version)
        dropped = await self._own.settle()
        self._keep_stats()
        kept, self._stats = self._stats, []
        engine_stats, recorder_stats = (merge_rank_stats(parts, 1) for parts in zip(*kept, strict=True))
        self._link.send(
            WeightsTaken(
                policy_version=message.policy_version,
                dropped=dropped,
                engine_stats=engine_stats,
                recorder_stats=recorder_stats,
            )
        )

    async def _run_round(self, order: RolloutOrder) -> None:
        """Run this rank's tasks of a round with the current weights, while the groups in flight wait."""
        actors, ranks = self._actors, self._actors.ranks
        self._keep_stats()
        source = PlannedTasks(range(ranks.rank, len(order.tasks), ranks.world_size))
        async with self._own.held():
            actors.engine.resume(order.policy_version)
            groups = await run_own_tasks(actors, order, source, RolloutProgress())
            actors.engine.pause()
        actors.engine.compute_stats()  # of this round, which are not counted
        actors.service.recorder.compute_stats()
        self._own.resume(order.policy_version)
        self._link.send(RoundDone(positions=source.taken, groups=groups))

    def _keep_stats(self) -> None:
        self._stats.append((self._actors.engine.compute_stats(), self._actors.service.recorder.compute_stats()))

    def _note_change(self) -> None:
        """Send complete groups."""
        assert self._failed is not None
        try:
            self._own.raise_error()
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            if not self._failed.done():
                self._failed.set_exception(error)
            return
        for number in sorted(self._own.complete):
            group = self._own.complete.pop(number).build()
            self._own.progress.finished.clear()
            self._num_sent += 1
            self._link.send(CompleteGroup(number=number, group=group))
