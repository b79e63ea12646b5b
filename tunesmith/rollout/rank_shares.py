"""Rounds of tasks on several ranks: who runs which task, and what comes back.

By plan, task p of a round is run by rank p modulo the number of ranks, all rollouts of it, so a group is on one rank;
on demand (`rollout.assignment: balanced`), by the rank that takes it from a counter. Seeds depend on the position of a
task in its round, never on the rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from tunesmith.cluster.ranks import Ranks
from tunesmith.cluster.shared_counter import SharedCounters
from tunesmith.experience.path_cost import PathCost
from tunesmith.rollout.branching.stats import BranchingCounts
from tunesmith.rollout.task_source import PlannedTasks, TasksOnDemand, TaskSource
from tunesmith.types import Group, Sampling, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOrder:
    """One round of tasks, as the first rank asks all ranks to run it."""

    tasks: Sequence[Task]
    group_size: int
    seed: int
    step: int
    sampling: Sampling | None
    baseline_sampling: Sampling | None
    policy_version: int
    number: int
    """Number of rounds of this process before it."""
    has_branches: bool = False
    """Whether rollouts branch, as `rollout.branching`."""
    has_one_sampler: bool = False
    """Whether the first rank runs all tasks, because only it has a sampler."""

    def build_source(self, ranks: Ranks, counters: SharedCounters | None) -> TaskSource:
        """What hands a rank its tasks: the counters, or without them a plan."""
        if self.has_one_sampler:
            return PlannedTasks(range(len(self.tasks) if ranks.is_first else 0))
        if counters is None:
            return PlannedTasks(range(ranks.rank, len(self.tasks), ranks.world_size))
        take_next = partial(counters.take, f"round {self.number}")
        return TasksOnDemand(take_next, num_tasks=len(self.tasks), num_ranks=ranks.world_size)


class Round(Protocol):
    """Groups that all ranks hand to the first rank at once."""

    @property
    def number(self) -> int:
        """As in `RolloutOrder`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """What a rank hands to the first rank after a round."""

    groups: Sequence[Group]
    positions: Sequence[int]
    """Of the groups, in their round."""
    costs: Sequence[PathCost]
    engine_stats: Mapping[str, float]
    recorder_stats: Mapping[str, float]
    rollout_s: float
    branching: BranchingCounts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOrigin:
    """Where a group was run, and how much work training it is."""

    rank: int
    key: tuple[int, int]
    """Number of its round and position in it: its key in `RankLedger.kept` of that rank."""
    cost: PathCost


@dataclass(slots=True, kw_only=True)
class RankLedger:
    """The groups that a rank has run in this step and, on the first rank, the origins of all groups."""

    num_rounds: int = 0
    kept: dict[tuple[int, int], Group] = field(default_factory=dict)
    """This rank's groups by round and position."""
    rollout_s: list[float] = field(default_factory=list)
    """Seconds of rollouts of each rank."""
    exchange_s: float = 0.0
    """Seconds of the first rank in handing out and collecting rounds, without the rollouts of any rank."""
    _origins: dict[int, tuple[Group, GroupOrigin]] = field(default_factory=dict)
    """By `id` of the group, which stays alive."""
    _engine_stats: list[Mapping[str, float]] = field(default_factory=list)
    _recorder_stats: list[Mapping[str, float]] = field(default_factory=list)

    def keep(self, order: Round, positions: Sequence[int], groups: Sequence[Group]) -> None:
        """Keep groups that this rank has run."""
        self.num_rounds += 1
        self.kept |= {(order.number, position): group for position, group in zip(positions, groups, strict=True)}

    def add_round(self, order: Round, shares: Sequence[RankShare]) -> list[Group]:
        """Add the shares of all ranks on the first one, which kept its own; return the groups in task order."""
        groups: dict[int, Group] = {}
        for rank, share in enumerate(shares):
            own = [self.kept[order.number, position] for position in share.positions] if rank == 0 else share.groups
            for position, group, cost in zip(share.positions, own, share.costs, strict=True):
                groups[position] = group
                self._origins[id(group)] = (group, GroupOrigin(rank=rank, key=(order.number, position), cost=cost))
        self._engine_stats += [share.engine_stats for share in shares[1:]]
        self._recorder_stats += [share.recorder_stats for share in shares[1:]]
        seconds = [share.rollout_s for share in shares]
        self.rollout_s = [sum(pair) for pair in zip(self.rollout_s or [0.0] * len(shares), seconds, strict=True)]
        return [groups[position] for position in sorted(groups)]

    def add_stats(self, *, engine: Mapping[str, float], recorder: Mapping[str, float]) -> None:
        """Add counters of a rank that only samples."""
        self._engine_stats.append(engine)
        self._recorder_stats.append(recorder)

    def find_origin(self, group: Group) -> GroupOrigin | None:
        """Where the group was run; None if it was not run in this step, or was changed since."""
        found = self._origins.get(id(group))
        return None if found is None else found[1]

    def clear(self) -> None:
        """Forget the groups of the step."""
        self.kept.clear()
        self._origins.clear()
        self.rollout_s, self.exchange_s = [], 0.0

    def take_engine_stats(self) -> list[Mapping[str, float]]:
        """Counters of the other ranks' engines since the last call."""
        stats, self._engine_stats = self._engine_stats, []
        return stats

    def take_recorder_stats(self) -> list[Mapping[str, float]]:
        """Counters of the other ranks' recorders since the last call."""
        stats, self._recorder_stats = self._recorder_stats, []
        return stats


def merge_rank_stats(parts: Sequence[Mapping[str, float]], num_ranks: int) -> dict[str, float]:
    """Sums of counters; times (`perf/`) as means over ranks."""
    merged: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            merged[name] = merged.get(name, 0.0) + (value / num_ranks if name.startswith("perf/") else value)
    return merged
