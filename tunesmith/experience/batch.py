"""The groups of one step: collected, passed through the operators, and filled up where some teach nothing.

Dynamic sampling (Yu et al., 2025, section 3.2): tasks are drawn and tried until the batch has its size in groups that
teach something, or until the step's budget of tasks is spent. What was tried and is not trained is kept and counted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from tunesmith.experience.table import BoundOperator, apply_operators
from tunesmith.metric import merge_metrics
from tunesmith.types import Group, RunAdvantage, Task

Draw = Callable[[int], list[Task]]
"""Selects so many tasks."""
Collect = Callable[[Sequence[Task]], Awaitable[list[Group]]]
"""Runs the workflow and the judge on tasks, `group_size` times each."""


@dataclass(slots=True, kw_only=True)
class Batch:
    """What a step tried and what of it trains."""

    collected: list[Group] = field(default_factory=list)
    """Every group as it was run."""
    groups: list[Group] = field(default_factory=list)
    """Those that train, as the operators left them."""
    positions: list[int] = field(default_factory=list)
    """Where in `collected` each of `groups` came from."""
    is_useful: list[bool] = field(default_factory=list)
    """Whether the rewards of each of `groups` teach something."""
    metrics: dict[str, float] = field(default_factory=dict)

    def spread(self, advantages: Sequence[Sequence[RunAdvantage]]) -> list[list[RunAdvantage]]:
        """Advantages of `groups` as those of `collected`; None for whatever does not train."""
        spread: list[list[RunAdvantage]] = [[None] * len(group.trajectories) for group in self.collected]
        for position, group, row in zip(self.positions, self.groups, advantages, strict=True):
            value_of = {run.run_index: value for run, value in zip(group.trajectories, row, strict=True)}
            runs = self.collected[position].trajectories
            spread[position] = [value_of.get(run.run_index) for run in runs]
        return spread


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """How many groups a step wants, and how many tasks it may try for them."""

    num_groups: int
    max_tasks: int


async def gather_batch(
    size: BatchSize,
    *,
    draw: Draw,
    collect: Collect,
    operators: Sequence[BoundOperator],
    teaches: Callable[[Group], bool],
) -> Batch:
    """Try `num_groups` tasks; while some of their groups teach nothing and the budget lasts, try others."""
    batch, rounds = Batch(), []
    num_wanted, num_useful = size.num_groups, 0
    while num_wanted:
        groups = await collect(draw(num_wanted))
        kept, metrics = apply_operators(groups, operators)
        is_useful = [teaches(group) for group in kept]
        has_budget = size.max_tasks > size.num_groups
        for position, (group, useful) in enumerate(zip(kept, is_useful, strict=True), start=len(batch.collected)):
            if useful or (group.trajectories and not has_budget):
                batch.groups.append(group)
                batch.positions.append(position)
                batch.is_useful.append(useful)
        batch.collected += groups
        rounds.append((len(groups), metrics))
        num_useful += sum(is_useful)
        num_wanted = min(size.num_groups - num_useful, size.max_tasks - len(batch.collected))
    batch.metrics = merge_rounds(rounds) | {
        "experience/num_rounds": float(len(rounds)),
        "experience/num_tasks_tried": float(len(batch.collected)),
        "experience/num_useful_groups": float(num_useful),
    }
    return batch


def merge_rounds(rounds: Sequence[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Metrics of all rounds, of which each has a number of groups: plain floats are averaged over groups."""
    return merge_metrics([metrics for _, metrics in rounds], weights=[size for size, _ in rounds])
