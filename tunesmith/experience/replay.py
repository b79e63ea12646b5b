"""Groups of earlier steps, trained again while they are fresh enough.

Priority is the group's policy version minus `decay` for each time it was used, plus noise where that is asked for. The
buffer's state names groups by step and place, with what operators changed of them; their turns are read back from the
rollouts on disk. So it is small, and a run that resumes goes on with the same groups in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tunesmith.config import ReplaySection
from tunesmith.types import Group

LoadGroups = Callable[[int], list[Group]]
"""The groups of a step as they were collected."""


@dataclass(slots=True, kw_only=True)
class Entry:
    """A group that may be trained again."""

    step: int
    position: int
    """Its place among the groups that its step collected."""
    policy_version: int
    group: Group
    """As the operators left it."""
    num_uses: int = 0


class ReplayBuffer:
    """Keeps up to `capacity` groups and hands out those of highest priority."""

    def __init__(self, settings: ReplaySection, *, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, groups: Sequence[Group], positions: Sequence[int], *, step: int, policy_version: int) -> None:
        """Take the groups that a step trained; over capacity, the lowest priorities go."""
        if not self._settings.num_groups:
            return
        self._entries += [
            Entry(step=step, position=position, policy_version=policy_version, group=group)
            for group, position in zip(groups, positions, strict=True)
        ]
        self._sort()
        del self._entries[self._settings.capacity :]

    def draw(self, *, policy_version: int) -> list[Group]:
        """The groups of highest priority that are fresh enough, and count their use."""
        oldest = policy_version - self._settings.max_staleness
        self._entries = [entry for entry in self._entries if entry.policy_version >= oldest]
        self._sort()
        drawn = self._entries[: self._settings.num_groups]
        for entry in drawn:
            entry.num_uses += 1
        self._entries = [entry for entry in self._entries if entry.num_uses < self._settings.max_uses]
        return [entry.group for entry in drawn]

    def state_dict(self) -> dict[str, Any]:
        return {"entries": [describe_entry(entry) for entry in self._entries]}

    def load_state_dict(self, state: Mapping[str, Any], load_groups: LoadGroups) -> None:
        """Read the groups of the steps that the state names."""
        steps = sorted({entry["step"] for entry in state["entries"]})
        collected = {step: load_groups(step) for step in steps}
        self._entries = [restore_entry(entry, collected[entry["step"]]) for entry in state["entries"]]

    def _sort(self) -> None:
        """Highest priority first; among equals the newer step, then the earlier place."""
        self._entries.sort(key=lambda entry: (-self._compute_priority(entry), -entry.step, entry.position))

    def _compute_priority(self, entry: Entry) -> float:
        priority = entry.policy_version - self._settings.decay * entry.num_uses
        if self._settings.sigma == 0:
            return priority
        rng = np.random.default_rng((self._seed, entry.step, entry.position, entry.num_uses))
        return priority + self._settings.sigma * float(rng.standard_normal())


def describe_entry(entry: Entry) -> dict[str, Any]:
    """An entry in values that JSON knows, without turns."""
    return {
        "step": entry.step,
        "position": entry.position,
        "policy_version": entry.policy_version,
        "num_uses": entry.num_uses,
        "runs": [
            {
                "run_index": run.run_index,
                "reward": run.reward,
                "untrained_turns": [place for place, turn in enumerate(run.turns) if not turn.is_trained],
            }
            for run in entry.group.trajectories
        ],
    }


def restore_entry(state: Mapping[str, Any], collected: Sequence[Group]) -> Entry:
    """The inverse of `describe_entry`, with the turns of the group as it was collected."""
    whole = collected[state["position"]]
    run_of = {run.run_index: run for run in whole.trajectories}
    runs = []
    for described in state["runs"]:
        run = run_of[described["run_index"]]
        untrained = set(described["untrained_turns"])
        turns = tuple(replace(turn, is_trained=place not in untrained) for place, turn in enumerate(run.turns))
        runs.append(replace(run, reward=described["reward"], turns=turns))
    return Entry(
        step=state["step"],
        position=state["position"],
        policy_version=state["policy_version"],
        group=replace(whole, trajectories=tuple(runs)),
        num_uses=state["num_uses"],
    )
