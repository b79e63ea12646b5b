"""Rounds of tasks on several ranks: who runs which task, and what comes back.

By plan, task p of a round is run by rank p modulo the number of ranks, all rollouts of it, so a group is on one rank;
on demand (`rollout.assignment: balanced`), by the rank that takes it from a counter. Seeds depend on the position of a
task in its round, never on the rank.

Most algorithms compute advantages from rewards alone. Then a rank sends outlines of its groups after a round, and the
groups with their tokens while the devices work on the update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from tunesmith.cluster.ranks import Ranks
from tunesmith.cluster.shared_counter import SharedCounters
from tunesmith.experience.path_cost import PathCost
from tunesmith.rollout.branching.stats import BranchingCounts
from tunesmith.rollout.task_source import PlannedTasks, TasksOnDemand, TaskSource
from tunesmith.types import Distribution, Failure, Group, Sampling, Task, Trajectory, Turn

NO_TOKENS = Turn(
    prompt_ids=(), sampled_ids=(), logprobs=(), policy_versions=(), distribution=Distribution(), stop_reason="cancelled"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutline:
    """A group without task, tokens and texts; fields but the last are per trajectory."""

    run_indices: tuple[int, ...]
    num_turns: tuple[int, ...]
    rewards: tuple[float | None, ...]
    metrics: tuple[Mapping[str, float], ...]
    failures: tuple[Failure | None, ...]
    baseline_reward: float | None

    def build_group(self, task: Task) -> Group:
        """The group, with as many turns as were made, all without tokens."""
        rows = zip(self.run_indices, self.num_turns, self.rewards, self.metrics, self.failures, strict=True)
        return Group(
            task=task,
            trajectories=tuple(
                Trajectory(
                    task=task,
                    run_index=run_index,
                    turns=(NO_TOKENS,) * num_turns,
                    reward=reward,
                    metrics=metrics,
                    failure=failure,
                )
                for run_index, num_turns, reward, metrics, failure in rows
            ),
            baseline_reward=self.baseline_reward,
        )


def outline_group(group: Group) -> GroupOutline:
    """The outline of a group."""
    runs = group.trajectories
    return GroupOutline(
        run_indices=tuple(run.run_index for run in runs),
        num_turns=tuple(len(run.turns) for run in runs),
        rewards=tuple(run.reward for run in runs),
        metrics=tuple(run.metrics for run in runs),
        failures=tuple(run.failure for run in runs),
        baseline_reward=group.baseline_reward,
    )


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
    has_tokens: bool = True
    """False: ranks send outlines of their groups, and the groups when the first rank collects them."""

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
    outlines: Sequence[GroupOutline] = ()
    """Instead of the groups if the order asks for no tokens."""
    positions: Sequence[int]
    """Of the groups, in their round."""
    costs: Sequence[PathCost]
    engine_stats: Mapping[str, float]
    recorder_stats: Mapping[str, float]
    rollout_s: float
    branching: BranchingCounts | None = None

    def build_groups(self, tasks: Sequence[Task]) -> RankShare:
        """The share of a round of these tasks, with groups without tokens if the rank sent outlines."""
        if not self.outlines:
            return self
        pairs = zip(self.positions, self.outlines, strict=True)
        return replace(self, groups=[outline.build_group(tasks[position]) for position, outline in pairs])


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOrigin:
    """Where a group was run, and how much work training it is."""

    rank: int
    key: tuple[int, int]
    """Number of its round and position in it: its key in `RankLedger.kept` of that rank."""
    cost: PathCost
    has_tokens: bool = True
    """False: the first rank has the outline only."""


@dataclass(slots=True, kw_only=True)
class RankLedger:
    """The groups that a rank has run in this step and, on the first rank, the origins of all groups."""

    num_rounds: int = 0
    kept: dict[tuple[int, int], Group] = field(default_factory=dict)
    """This rank's groups by round and position."""
    rollout_s: list[float] = field(default_factory=list)
    """Seconds of rollouts of each rank."""
    collect_s: float = 0.0
    """Seconds of the first rank in collecting groups whose outlines it has."""
    exchange_s: float = 0.0
    """Seconds of the first rank in handing out and collecting rounds, without the rollouts of any rank."""
    outlined: set[tuple[int, int]] = field(default_factory=set)
    """Keys of the groups in `kept` whose outlines were sent."""
    _collected: dict[int, Group] = field(default_factory=dict)
    """By `id` of the group without tokens."""
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
                key, has_tokens = (order.number, position), not share.outlines
                self._origins[id(group)] = (group, GroupOrigin(rank=rank, key=key, cost=cost, has_tokens=has_tokens))
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

    @property
    def has_outlines(self) -> bool:
        """Whether, on the first rank, groups of other ranks have no tokens."""
        return any(not origin.has_tokens for _, origin in self._origins.values())

    def take_outlined(self) -> dict[tuple[int, int], Group]:
        """This rank's groups whose outlines were sent since the last call, by key."""
        taken = {key: self.kept[key] for key in self.outlined}
        self.outlined.clear()
        return taken

    def add_collected(self, parts: Sequence[Mapping[tuple[int, int], Group]]) -> None:
        """Add the groups of other ranks, whose outlines the first rank has."""
        whole = {key: group for part in parts for key, group in part.items()}
        self._collected |= {
            place: whole[origin.key]
            for place, (_, origin) in self._origins.items()
            if not origin.has_tokens and origin.key in whole
        }

    def take_collected(self) -> dict[int, Group]:
        """The groups collected since the last call, by `id` of the same group without tokens."""
        collected, self._collected = self._collected, {}
        return collected

    def clear(self) -> None:
        """Forget the groups of the step."""
        self.kept.clear()
        self.outlined.clear()
        self._origins.clear()
        self.rollout_s, self.exchange_s, self.collect_s = [], 0.0, 0.0

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
