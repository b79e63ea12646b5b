"""Groups of earlier steps and expert demonstrations that a step trains, and the staleness of sampled tokens.

The replay buffer holds groups while their staleness is within `max_staleness`. Priority is the group's policy version
minus `decay` per use, plus Gaussian noise of scale `sigma`. The buffer's state holds the step and position of each
group and what operators changed in it; the turns are read back from the rollouts on disk. So the state is small, and a
resumed run replays the same groups in the same order.

Staleness is the number of policy versions between the weights that sampled a token and those that train on it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tunesmith.config import ReplaySection
from tunesmith.types import Group, RunAdvantage, Sample, Trajectory


def find_oldest_version(trajectories: Iterable[Trajectory]) -> int | None:
    """Policy version of the oldest sampled token; None if nothing was sampled."""
    versions = (turn.policy_versions for run in trajectories for turn in run.turns)
    return min((min(each) for each in versions if each), default=None)


def compute_staleness(
    groups: Sequence[Group], advantages: Sequence[Sequence[RunAdvantage]], *, policy_version: int
) -> dict[str, float]:
    """Mean and maximum staleness of the trained tokens in policy versions, and the turns of several versions."""
    turns = [
        turn.policy_versions
        for group, row in zip(groups, advantages, strict=True)
        for run, advantage in zip(group.trajectories, row, strict=True)
        for turn in run.turns
        if advantage is not None and turn.is_trained
    ]
    metrics = {"staleness/num_mixed_turns": float(sum(len(set(versions)) > 1 for versions in turns))}
    counts: Counter[int] = Counter()
    for versions in turns:
        counts.update(versions)
    if counts:
        lags = {policy_version - version: number for version, number in counts.items()}
        num_tokens = counts.total()
        metrics["staleness/mean"] = sum(lag * number for lag, number in lags.items()) / num_tokens
        metrics["staleness/max"] = float(max(lags))
        metrics["staleness/stale_frac"] = 1 - lags.get(0, 0) / num_tokens
    return metrics


LoadGroups = Callable[[int], list[Group]]
"""The groups of a step as they were collected."""


@dataclass(slots=True, kw_only=True)
class Entry:
    """A group that may be trained again."""

    step: int
    position: int
    """Index of the group in `Batch.collected` of its step."""
    policy_version: int
    group: Group
    """After the operators."""
    num_uses: int = 0


class ReplayBuffer:
    """Keeps up to `capacity` groups and replays those of highest priority."""

    def __init__(self, settings: ReplaySection, *, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(
        self,
        groups: Sequence[Group],
        positions: Sequence[int],
        *,
        step: int,
        policy_version: int,
        has_older_tokens: bool = False,
    ) -> None:
        """Add the groups that a step trained; beyond `capacity`, the lowest priorities are evicted.

        With `has_older_tokens` the version of a group is that of its oldest token.
        """
        if not self._settings.num_groups:
            return
        for group, position in zip(groups, positions, strict=True):
            oldest = find_oldest_version(group.trajectories) if has_older_tokens else None
            version = policy_version if oldest is None else min(oldest, policy_version)
            self._entries.append(Entry(step=step, position=position, policy_version=version, group=group))
        self._sort()
        del self._entries[self._settings.capacity :]

    def sample(self, *, policy_version: int) -> list[Group]:
        """The `num_groups` groups of highest priority; older than `max_staleness` are evicted. Counts one use each."""
        oldest = policy_version - self._settings.max_staleness
        self._entries = [entry for entry in self._entries if entry.policy_version >= oldest]
        self._sort()
        replayed = self._entries[: self._settings.num_groups]
        for entry in replayed:
            entry.num_uses += 1
        self._entries = [entry for entry in self._entries if entry.num_uses < self._settings.max_uses]
        return [entry.group for entry in replayed]

    def state_dict(self) -> dict[str, Any]:
        return {"entries": [describe_entry(entry) for entry in self._entries]}

    def load_state_dict(self, state: Mapping[str, Any], load_groups: LoadGroups) -> None:
        """Restore the entries; `load_groups` reads the groups of their steps."""
        steps = sorted({entry["step"] for entry in state["entries"]})
        collected = {step: load_groups(step) for step in steps}
        self._entries = [restore_entry(entry, collected[entry["step"]]) for entry in state["entries"]]

    def _sort(self) -> None:
        """Sort by priority, highest first; ties by newer step, then lower position."""
        self._entries.sort(key=lambda entry: (-self._compute_priority(entry), -entry.step, entry.position))

    def _compute_priority(self, entry: Entry) -> float:
        priority = entry.policy_version - self._settings.decay * entry.num_uses
        if self._settings.sigma == 0:
            return priority
        rng = np.random.default_rng((self._seed, entry.step, entry.position, entry.num_uses))
        return priority + self._settings.sigma * float(rng.standard_normal())


def describe_entry(entry: Entry) -> dict[str, Any]:
    """An entry as JSON values, without turns."""
    return {
        "step": entry.step,
        "position": entry.position,
        "policy_version": entry.policy_version,
        "num_uses": entry.num_uses,
        "runs": [
            {
                "run_index": run.run_index,
                "reward": run.reward,
                "metrics": {name: float(value) for name, value in run.metrics.items()},
                "untrained_turns": [index for index, turn in enumerate(run.turns) if not turn.is_trained],
            }
            for run in entry.group.trajectories
        ],
    }


def restore_entry(state: Mapping[str, Any], collected: Sequence[Group]) -> Entry:
    """The inverse of `describe_entry`; the turns come from the collected groups of the entry's step."""
    whole = collected[state["position"]]
    run_of = {run.run_index: run for run in whole.trajectories}
    runs = []
    for described in state["runs"]:
        run = run_of[described["run_index"]]
        untrained = set(described["untrained_turns"])
        turns = tuple(replace(turn, is_trained=index not in untrained) for index, turn in enumerate(run.turns))
        metrics = described.get("metrics", run.metrics)  # earlier versions saved none
        runs.append(replace(run, reward=described["reward"], metrics=metrics, turns=turns))
    return Entry(
        step=state["step"],
        position=state["position"],
        policy_version=state["policy_version"],
        group=replace(whole, trajectories=tuple(runs)),
        num_uses=state["num_uses"],
    )


class ExpertFeed:
    """Iterates over whole demonstrations, reshuffled each epoch."""

    def __init__(self, demonstrations: Sequence[Sequence[Sample]], *, num_per_step: int, seed: int) -> None:
        self._demonstrations = demonstrations
        self._num_per_step = num_per_step
        self._seed = seed

    def select(self, step: int) -> list[Sample]:
        """The samples of step 1, 2, ...; group and trajectory indices count from 0."""
        first = (step - 1) * self._num_per_step
        places = [divmod(position, len(self._demonstrations)) for position in range(first, first + self._num_per_step)]
        orders = {epoch: self._shuffle(epoch) for epoch in {epoch for epoch, _ in places}}
        selected = [self._demonstrations[orders[epoch][offset]] for epoch, offset in places]
        return [
            replace(sample, group_index=index, trajectory_index=index)
            for index, demonstration in enumerate(selected)
            for sample in demonstration
        ]

    def _shuffle(self, epoch: int) -> list[int]:
        order = list(range(len(self._demonstrations)))
        random.Random(f"experts-{self._seed}-{epoch}").shuffle(order)
        return order
