"""The groups of one step, collected in one or several rounds.

Dynamic sampling (Yu et al., 2025, section 3.2): tasks are selected and run until the batch holds `num_groups` groups
with non-zero advantage, or until `max_tasks` tasks have been run. Every group that was run is kept and counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress

from tunesmith.experience.finished_group import drop_routes
from tunesmith.metric import merge_metrics
from tunesmith.types import Group, RunAdvantage, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """Number of groups that a step needs, and the largest number of tasks that it runs to get them."""

    num_groups: int
    max_tasks: int

    @property
    def has_refill(self) -> bool:
        """Whether groups with zero advantage are replaced by other tasks; otherwise they stay in the batch."""
        return self.max_tasks > self.num_groups


@dataclass(slots=True, kw_only=True)
class Batch:
    """The groups of a step: all that were run, and the subset that trains."""

    size: BatchSize
    collected: list[Group] = field(default_factory=list)
    """Every group, before the operators."""
    groups: list[Group] = field(default_factory=list)
    """The groups that train, after the operators."""
    positions: list[int] = field(default_factory=list)
    """Index in `collected` of each of `groups`."""
    has_advantage: list[bool] = field(default_factory=list)
    """Whether each of `groups` has a non-zero advantage."""
    _rounds: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    """Number of groups and operator metrics of each round."""

    @property
    def num_rounds(self) -> int:
        return len(self._rounds)

    @property
    def num_missing(self) -> int:
        """Number of tasks to run in the next round; 0 when the batch is full or `max_tasks` have been run."""
        if not self._rounds:
            return self.size.num_groups
        return max(min(self.size.num_groups - sum(self.has_advantage), self.size.max_tasks - len(self.collected)), 0)

    @property
    def recorded(self) -> list[Group]:
        """`collected`, with the turns that operators excluded from training marked; rewards stay the judge's."""
        recorded = list(self.collected)
        for position, group in zip(self.positions, self.groups, strict=True):
            kept = {run.run_index: run for run in group.trajectories}
            runs = recorded[position].trajectories
            marked = tuple(copy_mask(run, kept.get(run.run_index, run)) for run in runs)
            recorded[position] = replace(recorded[position], trajectories=marked)
        return recorded

    @property
    def with_advantage(self) -> tuple[list[Group], list[int]]:
        """The groups with non-zero advantage, and their index in `collected`."""
        return list(compress(self.groups, self.has_advantage)), list(compress(self.positions, self.has_advantage))

    def add_round(
        self,
        groups: Sequence[Group],
        kept: Sequence[Group],
        metrics: Mapping[str, float],
        *,
        has_advantage: Sequence[bool],
    ) -> None:
        """Add the groups of one round: `groups` before and `kept` after the operators."""
        first = len(self.collected)
        for position, (group, is_trainable) in enumerate(zip(kept, has_advantage, strict=True), start=first):
            if is_trainable or (group.trajectories and not self.size.has_refill):
                self.groups.append(group)
                self.positions.append(position)
                self.has_advantage.append(is_trainable)
        self.collected += groups
        self._rounds.append((len(groups), metrics))

    def complete(self, whole: Mapping[int, Group]) -> None:
        """Put whole groups in place of groups without tokens, by their index in `collected`; operators left them as
        they were."""
        self.collected = [whole.get(index, group) for index, group in enumerate(self.collected)]
        self.groups = [whole.get(index, group) for index, group in zip(self.positions, self.groups, strict=True)]

    def drop_routes(self) -> None:
        """After training, which alone needs them: a resumed run reads the groups from files, which have none."""
        for groups in (self.collected, self.groups):
            groups[:] = [group.map(drop_routes) for group in groups]

    def compute_metrics(self) -> dict[str, float]:
        """Operator metrics merged over rounds (plain floats averaged over groups), and counts of rounds, tasks and
        groups with an advantage."""
        merged = merge_metrics([metrics for _, metrics in self._rounds], weights=[size for size, _ in self._rounds])
        return merged | {
            "experience/num_rounds": float(len(self._rounds)),
            "experience/num_tasks_tried": float(len(self.collected)),
            "experience/num_useful_groups": float(sum(self.has_advantage)),
        }

    def spread(self, advantages: Sequence[Sequence[RunAdvantage]]) -> list[list[RunAdvantage]]:
        """Advantages of `groups` in the layout of `collected`; None for trajectories that do not train."""
        spread: list[list[RunAdvantage]] = [[None] * len(group.trajectories) for group in self.collected]
        for position, group, row in zip(self.positions, self.groups, advantages, strict=True):
            value_of = {run.run_index: value for run, value in zip(group.trajectories, row, strict=True)}
            runs = self.collected[position].trajectories
            spread[position] = [value_of.get(run.run_index) for run in runs]
        return spread


def copy_mask(run: Trajectory, kept: Trajectory) -> Trajectory:
    """`run` with the `is_trained` flags of `kept`, the same trajectory after the operators."""
    if all(turn.is_trained for turn in kept.turns) or len(run.turns) != len(kept.turns):
        return run
    pairs = zip(run.turns, kept.turns, strict=True)
    return replace(run, turns=tuple(replace(turn, is_trained=other.is_trained) for turn, other in pairs))
