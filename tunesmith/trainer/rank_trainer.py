"""The update of a step on one or several ranks: who trains which group, and how its tokens get there.

A group is trained where its tokens are, unless another rank has less work. The first rank calls `step`; the others
carry out its messages with `follow`. Of a step on two ranks, where the first one has a reference to group 13:

    first rank                                      rank 1
    Update()                                   ->
    TrainPart(groups=(number=12, ...), ...)   <-> TrainPart(groups=(number=13, advantages=...), ...)   a scatter
    rows of group 12 are queued                     rows of group 13 are queued
    receives the tokens of group 13            <-   hands them over                                    a gather
    saves the rollouts of the step
    both reduce gradients and update the weights

All of these but `Update` are collectives: every rank takes part in all of them, in this order, so a rank waits for the
slowest one. The gather and the saving happen while the devices compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TypeVar

import numpy as np

from tunesmith.cluster.links import Link
from tunesmith.cluster.ranks import Ranks
from tunesmith.cluster.work_thread import NoThread, WorkThread
from tunesmith.experience.batch import Batch
from tunesmith.experience.finished_group import FinishedGroup, drop_routes, measure_group
from tunesmith.experience.samples import build_samples
from tunesmith.trainer.packing import combine_cost
from tunesmith.trainer.sharding.sharded_model import find_sharding, iter_whole_weights
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import Group, RunAdvantage, Sample

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """What a step trains."""

    batch: Batch
    finished: Sequence[FinishedGroup]
    """As `batch.collected`."""
    replayed: Sequence[Group] = ()
    """Of earlier steps; they follow those of the batch."""
    advantages: Sequence[Sequence[RunAdvantage]]
    """Of the groups of the batch and the replayed ones."""
    experts: Sequence[Sample] = ()
    """Demonstrations."""

    @property
    def groups(self) -> list[Group]:
        return [*self.batch.groups, *self.replayed]


SaveRollouts = Callable[[Sequence[Group], Sequence[Sequence[RunAdvantage]]], None]
"""Saves all groups of a step with their advantages, while the device computes the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Take part in an update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveState:
    """Take part in gathering the weights, if they are sharded, and the trainer's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedGroup:
    """A group that a rank trains."""

    group: Group | int
    """The group, or the number under which the rank keeps it or receives it from a third rank."""
    indices: tuple[int, int]
    """Of the group, and of its first trajectory, in what the step trains."""
    advantages: Sequence[RunAdvantage]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPart:
    """What a rank trains in a step."""

    groups: Sequence[TrainedGroup]
    experts: Sequence[Sample]
    """Demonstrations, with their indices in what the step trains."""
    policy_version: int
    has_hard_credit: bool
    moved: Sequence[int]
    """Numbers of the groups that go from the ranks that keep them to others, not by the first rank."""
    referenced: Sequence[int]
    """Numbers of the groups that the first rank receives during the update."""
    taken: Sequence[int]
    """Numbers of all groups of the step, which nobody needs after it."""


@dataclass(slots=True, kw_only=True)
class RankTrainer:
    """The trainer of this rank, and its part in the steps of all ranks."""

    trainer: Trainer
    ranks: Ranks = field(default_factory=Ranks)
    """The ranks that train."""
    links: Sequence[Link] = ()
    """To the other ranks that train, on the first one."""
    kept: MutableMapping[int, Group] = field(default_factory=dict)
    """Groups that this rank has run, by number; not on the first one."""
    thread: WorkThread | NoThread = field(default_factory=NoThread)
    """Where work is done that blocks."""
    has_hard_credit: bool = False
    """As `rollout.branching.credit: hard`."""

    async def step(
        self,
        groups: StepGroups,
        *,
        policy_version: int,
        times: Mapping[str, float],
        record: SaveRollouts | None = None,
    ) -> dict[str, float]:
        """Train the groups of a step on all ranks; metrics of the samples and of the trainer.

        Only the first rank calls this. Afterwards the batch has the tokens of all groups, and `record` has saved it.
        `times` are seconds of handing out and collecting groups, which are metrics on several ranks.
        """
        if self.ranks.is_alone:
            return await self.thread.run(lambda: self._train_alone(groups, policy_version, record))
        await self._announce(Update())
        return await self.thread.run(lambda: self._lead(groups, policy_version, times, record))

    async def save(self, save: Callable[[], T]) -> T:
        """Save a checkpoint, for which all ranks gather the trainer's state."""
        await self._announce(SaveState())
        return await self.thread.run(save)

    async def follow(self, message: Update | SaveState) -> None:
        """Take part in what the first rank does."""
        await self.thread.run(self._follow_update if isinstance(message, Update) else self._follow_save)

    def _follow_update(self) -> None:
        part: TrainPart = self.ranks.scatter_objects()
        own = dict(self.kept)
        self._train(part, own, [lambda: self._hand_over(part)] if part.referenced else [])
        for number in part.taken:
            self.kept.pop(number, None)
        self.trainer.take_times()  # of this rank: they are not shown, and would otherwise pile up

    def _follow_save(self) -> None:
        if find_sharding(self.trainer.model) is not None:
            for _ in iter_whole_weights(self.trainer.model):
                pass
        self.trainer.state_dict()

    async def _announce(self, message: Update | SaveState) -> None:
        """The messages must have left before this rank enters a collective, which may block its event loop."""
        for link in self.links:
            link.send(message)
        for link in self.links:
            await link.drain()

    def _train_alone(self, groups: StepGroups, policy_version: int, record: SaveRollouts | None) -> dict[str, float]:
        samples, metrics = build_samples(groups.groups, groups.advantages, has_hard_credit=self.has_hard_credit)
        (experts,) = split_experts(groups, 1)
        pieces = [] if record is None else [lambda: save_batch(record, groups)]
        metrics |= self.trainer.step([*samples, *experts], policy_version=policy_version, host_work=pieces)
        return metrics | self.trainer.take_times()

    def _lead(
        self, groups: StepGroups, policy_version: int, times: Mapping[str, float], record: SaveRollouts | None
    ) -> dict[str, float]:
        parts, metrics = self._divide(groups, policy_version)
        started = time.perf_counter()
        part = self.ranks.scatter_objects(parts)
        metrics |= {**times, "perf/exchange_s": times["perf/exchange_s"] + time.perf_counter() - started}
        metrics["perf/collect_s"] = 0.0

        def receive() -> None:
            started = time.perf_counter()
            self._receive(groups)
            metrics["perf/collect_s"] += time.perf_counter() - started

        pieces = [receive] if part.referenced else []
        pieces += [] if record is None else [lambda: save_batch(record, groups)]
        own = {each.number: each.group for each in groups.finished if each.rank == 0}
        return self._train(part, own, pieces) | metrics | self.trainer.take_times()

    def _divide(self, groups: StepGroups, policy_version: int) -> tuple[list[TrainPart], dict[str, float]]:
        """What each rank trains, and metrics of the balance."""
        origins = find_origins(groups)
        costs, owners = self._measure(groups, origins)
        num_ranks = self.ranks.world_size
        assigned = assign_groups(costs, owners, num_ranks, num_minibatches=self.trainer.num_minibatches)
        trained: list[list[TrainedGroup]] = [[] for _ in range(num_ranks)]
        loads, moved = [0.0] * num_ranks, []
        starts = np.cumsum([0, *(len(group.trajectories) for group in groups.groups)]).tolist()
        indices_of_groups = enumerate(starts[:-1])  # of the group, and of its first trajectory
        rows = zip(groups.groups, origins, indices_of_groups, groups.advantages, costs, assigned, strict=True)
        for group, origin, indices, advantages, cost, rank in rows:
            named: Group | int = group
            if origin is not None and (origin.rank == rank or not origin.has_tokens):
                named = origin.number
                moved += [origin.number] if origin.rank != rank else []
            trained[rank].append(TrainedGroup(group=named, indices=indices, advantages=advantages))
            loads[rank] += cost
        parts = [
            TrainPart(
                groups=own,
                experts=demonstrations,
                policy_version=policy_version,
                has_hard_credit=self.has_hard_credit,
                moved=moved,
                referenced=[each.number for each in groups.finished if not each.has_tokens],
                taken=[each.number for each in groups.finished],
            )
            for own, demonstrations in zip(trained, split_experts(groups, num_ranks), strict=True)
        ]
        return parts, {
            "cluster/num_ranks": float(num_ranks),
            "cluster/num_moved_groups": float(sum(rank != owner for rank, owner in zip(assigned, owners, strict=True))),
            "cluster/imbalance": max(loads) / fmean(loads) - 1 if any(loads) else 0.0,
        }

    def _measure(self, groups: StepGroups, origins: Sequence[FinishedGroup | None]) -> tuple[list[float], list[int]]:
        """Cost of training each group, 0 without an advantage, and the rank that has its tokens."""
        costs, owners = [], []
        for group, origin, row in zip(groups.groups, origins, groups.advantages, strict=True):
            is_trained = any(advantage is not None for advantage in row)
            size = measure_group(group) if origin is None or origin.cost is None else origin.cost
            cost = combine_cost(size.num_tokens, size.num_pairs, hidden_size=self.trainer.hidden_size)
            costs.append(cost if is_trained else 0.0)
            owners.append(0 if origin is None else origin.rank)
        return costs, owners

    def _train(
        self, part: TrainPart, own: Mapping[int, Group], pieces: Sequence[Callable[[], None]]
    ) -> dict[str, float]:
        """Train this rank's part of a step, together with the other ranks; metrics over all of them."""
        found = {**own, **self._exchange(part.moved, own)}
        samples, metrics = build_samples(
            [found[each.group] if isinstance(each.group, int) else each.group for each in part.groups],
            [each.advantages for each in part.groups],
            has_hard_credit=part.has_hard_credit,
            places=[each.indices for each in part.groups],
        )
        trained = self.trainer.step(
            [*samples, *part.experts], policy_version=part.policy_version, host_work=list(pieces)
        )
        gathered = self.ranks.all_gather_objects(metrics)
        return {name: sum(each[name] for each in gathered) for name in metrics} | trained

    def _exchange(self, moved: Sequence[int], own: Mapping[int, Group]) -> dict[int, Group]:
        """The groups of these numbers, from the ranks that keep them; all ranks call this."""
        if not moved:
            return {}
        parts = self.ranks.all_gather_objects({number: own[number] for number in moved if number in own})
        return {number: group for part in parts for number, group in part.items()}

    def _hand_over(self, part: TrainPart) -> None:
        """Hand the first rank the groups that it has references to; all ranks do, or receive."""
        groups = {number: self.kept[number] for number in part.referenced if number in self.kept}
        self.ranks.gather_objects({number: group.map(drop_routes) for number, group in groups.items()})

    def _receive(self, groups: StepGroups) -> None:
        """Complete the batch with the groups of other ranks."""
        parts: list[dict[int, Group]] | None = self.ranks.gather_objects({})
        assert parts is not None, "this is the first rank"
        whole = {number: group for part in parts for number, group in part.items()}
        groups.batch.complete(
            {
                index: each.complete(whole[each.number])
                for index, each in enumerate(groups.finished)
                if not each.has_tokens
            }
        )


def save_batch(record: SaveRollouts, groups: StepGroups) -> None:
    """Save the batch with its advantages, without those of replayed groups."""
    batch = groups.batch
    record(batch.recorded, batch.spread(groups.advantages[: len(batch.groups)]))


def find_origins(groups: StepGroups) -> list[FinishedGroup | None]:
    """Where the tokens of each group are; None: on the first rank, as an operator or the replay buffer left them."""
    batch = groups.batch
    found = [groups.finished[position] for position in batch.positions]
    origins = [each if each.group is group else None for each, group in zip(found, batch.groups, strict=True)]
    return [*origins, *(None for _ in groups.replayed)]


def assign_groups(costs: Sequence[float], owners: Sequence[int], num_ranks: int, *, num_minibatches: int) -> list[int]:
    """The rank that trains each group; work is balanced within each minibatch, after which ranks wait."""
    assigned = list(owners)
    trained = [index for index, cost in enumerate(costs) if cost > 0]
    for first in range(num_minibatches):
        part = trained[first::num_minibatches]
        ranks = balance_work([costs[index] for index in part], [owners[index] for index in part], num_ranks)
        for index, rank in zip(part, ranks, strict=True):
            assigned[index] = rank
    return assigned


def split_experts(groups: StepGroups, num_ranks: int) -> list[list[Sample]]:
    """The demonstrations of each rank, by group; their indices continue those of the groups."""
    first_trajectory = sum(len(group.trajectories) for group in groups.groups)
    parts: list[list[Sample]] = [[] for _ in range(num_ranks)]
    for sample in groups.experts:
        placed = replace(
            sample,
            group_index=len(groups.groups) + sample.group_index,
            trajectory_index=first_trajectory + sample.trajectory_index,
        )
        parts[sample.group_index % num_ranks].append(placed)
    return parts


TOLERANCE = 0.02
"""Excess of the busiest rank over the mean, as a share of the mean, that is not worth moving a group."""


def balance_work(costs: Sequence[float], owners: Sequence[int], num_ranks: int) -> list[int]:
    """The rank of each item: its owner, unless moving it makes the busiest rank less busy.

    While the busiest rank exceeds the mean by `TOLERANCE`, one of its items moves to the least busy rank: the one that
    brings the two closest to each other. The result is a function of the arguments.
    """
    ranks = list(owners)
    loads = [0.0] * num_ranks
    for cost, rank in zip(costs, ranks, strict=True):
        loads[rank] += cost
    mean = sum(loads) / num_ranks
    for _ in range(len(costs)):
        busiest = max(range(num_ranks), key=lambda rank: (loads[rank], -rank))
        idlest = min(range(num_ranks), key=lambda rank: (loads[rank], rank))
        gap = loads[busiest] - loads[idlest]
        movable = [item for item, rank in enumerate(ranks) if rank == busiest and 0 < costs[item] < gap]
        if not movable or loads[busiest] <= mean * (1 + TOLERANCE):
            break
        item = min(movable, key=lambda item: (abs(costs[item] - gap / 2), item))
        ranks[item] = idlest
        loads[busiest] -= costs[item]
        loads[idlest] += costs[item]
    return ranks
