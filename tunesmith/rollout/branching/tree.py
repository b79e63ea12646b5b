"""Runs the rollouts of one task as trees.

Every rollout owns a share of the group's rollouts. At a branch point it gives part of its share to each branch; what it
has left when it ends starts a new rollout from the task. So exactly `group_size` rollouts are run, no rollout takes
the share of another, and what a rollout does depends on its seed alone, not on which rollout is faster.

An entropy here is the sum of the token entropies of a window divided by the log of the vocabulary size, as in ARPO
(Dong et al., 2025, section 3.1): 0 for a deterministic window, the window's length for a uniform one.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

from tunesmith.config.rollout import BranchingSection
from tunesmith.rollout.branching.stats import BranchingStats
from tunesmith.rollout.cancellation import cancel_all
from tunesmith.rollout.recording.replay import BranchPoint, RecordedCall, RolloutRecord
from tunesmith.rollout.seeds import derive_seed


def compute_window_entropy(entropies: Sequence[float], *, window: int, vocab_size: int) -> float:
    """Entropy of the first `window` tokens of a turn, given in nats per token.

    A shorter turn counts with its mean for the missing tokens, so that short turns do not look certain.
    """
    return window * fmean(entropies[:window]) / math.log(vocab_size)


def compute_branch_probability(section: BranchingSection, *, change: float, num_consecutive: int) -> float:
    """Probability of each further continuation at a branch point.

    `change` is the entropy after the tool result minus that at the start of the rollout (ARPO, eq. 3);
    `num_consecutive` counts the branch points with a branch directly before it on its path (AEPO).
    """
    probability = min(max(section.base_probability + section.entropy_weight * change, 0.0), 1.0)
    return probability * max(1.0 - section.consecutive_penalty * num_consecutive, 0.0)


def split_evenly(total: int, num_parts: int) -> list[int]:
    """`total` in parts that differ by at most 1, larger ones first."""
    size, num_larger = divmod(total, num_parts)
    return [size + (index < num_larger) for index in range(num_parts)]


def divide_budget(budget: int, num_branches: int) -> list[int]:
    """How many rollouts each of `num_branches` new branches receives, itself included; the parent keeps the rest.

    What is left after one rollout for each branch is split evenly between the branches and the parent.
    """
    assert 0 <= num_branches <= budget
    return [1 + share for share in split_evenly(budget - num_branches, num_branches + 1)[:num_branches]]


def choose_num_initial(
    group_size: int, *, slope: float, entropy_at_start: float, tool_entropies: Sequence[float]
) -> int:
    """AEPO's number of initial rollouts (Dong et al., 2025, eq. 6), at least 1."""
    gap = slope * (entropy_at_start - fmean(tool_entropies))
    share = 1 / (1 + math.exp(-gap)) if gap > -700 else 0.0
    return min(max(round(group_size * share), 1), group_size)


RunRollout = Callable[[int, RolloutRecord], Awaitable[object]]
"""Runs the rollout with this `run_index` under this record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branching:
    """How the groups of a run branch; built once for a run."""

    section: BranchingSection
    vocab_size: int
    stats: BranchingStats = field(default_factory=BranchingStats)

    def count_initial(self, group_size: int) -> int:
        given = self.section.initial_rollouts
        return min((group_size + 1) // 2 if given is None else given, group_size)


@dataclass(slots=True, kw_only=True, eq=False)
class _Rollout:
    """One rollout and the indices that it may still give away: `next_index` to `end` - 1."""

    run_index: int
    next_index: int
    end: int
    record: RolloutRecord
    entropy_at_start: float | None = None
    num_consecutive: int = 0
    """Branch points with a branch directly before, on this rollout's path."""
    tool_entropies: list[float] = field(default_factory=list)
    pending: list[tuple[RecordedCall, float]] | None = None
    """Branch points of a rollout whose share is not known yet; None once it is."""

    @property
    def budget(self) -> int:
        return self.end - self.next_index


class GroupTrees:
    """The rollouts of one task: initial ones, branches, and new ones from the task, `group_size` in all."""

    def __init__(self, branching: Branching, *, group_size: int, seed: int, run: RunRollout) -> None:
        """`seed` determines the draws at branch points."""
        self._branching = branching
        self._group_size = group_size
        self._seed = seed
        self._run = run
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Run all rollouts to their end."""
        num_initial = self._branching.count_initial(self._group_size)
        slope = self._branching.section.dynamic_budget_slope
        try:
            if slope is None:
                self._branching.stats.initial.append(num_initial)
                self._start_initial(0, split_evenly(self._group_size, num_initial))
            else:
                await self._start_after_first(num_initial, slope)
            while running := [task for task in self._tasks if not task.done()]:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                self._raise_error()
            self._raise_error()
        finally:
            await cancel_all(self._tasks)

    def _start_initial(self, start: int, shares: list[int]) -> None:
        for share in shares:
            self._start(self._open(start, start + share))
            start += share

    async def _start_after_first(self, num_initial: int, slope: float) -> None:
        """AEPO: run one rollout, choose the number of initial ones from its entropies, then start the others."""
        first = self._open(0, 1)
        first.pending = []
        await self._run_one(first)
        if first.tool_entropies and first.entropy_at_start is not None:
            num_initial = choose_num_initial(
                self._group_size,
                slope=slope,
                entropy_at_start=first.entropy_at_start,
                tool_entropies=first.tool_entropies,
            )
        self._branching.stats.initial.append(num_initial)
        own, *others = split_evenly(self._group_size, num_initial)
        points, first.pending, first.end = first.pending, None, own
        for call, entropy in points:
            self._decide(first, call, entropy)
        self._start_fresh(first)
        self._start_initial(own, others)

    def _open(self, run_index: int, end: int, point: BranchPoint | None = None) -> _Rollout:
        record = RolloutRecord(point=point)
        rollout = _Rollout(run_index=run_index, next_index=run_index + 1, end=end, record=record)
        record.on_call = partial(self._receive_call, rollout)
        return rollout

    def _start(self, rollout: _Rollout) -> None:
        self._tasks.append(asyncio.create_task(self._run_and_continue(rollout)))

    async def _run_and_continue(self, rollout: _Rollout) -> None:
        await self._run_one(rollout)
        self._start_fresh(rollout)

    async def _run_one(self, rollout: _Rollout) -> None:
        await self._run(rollout.run_index, rollout.record)
        self._branching.stats.add_record(rollout.record)

    def _start_fresh(self, rollout: _Rollout) -> None:
        """Start a rollout from the task with what an ended rollout did not give to branches."""
        if rollout.budget:
            self._branching.stats.counts["fresh_rollouts"] += 1
            self._start(self._open(rollout.next_index, rollout.end))

    def _receive_call(self, rollout: _Rollout, call: RecordedCall) -> None:
        """A model call of the rollout has finished: compare its entropy, and branch or not."""
        turn = call.choices[min(call.choices)].turn
        if turn.entropies is None:
            raise RuntimeError("the engine returned no entropies, which branching rollouts need")
        if not turn.entropies:
            return
        entropy = compute_window_entropy(
            turn.entropies, window=self._branching.section.entropy_window, vocab_size=self._branching.vocab_size
        )
        if rollout.entropy_at_start is None:
            rollout.entropy_at_start = entropy
        if not call.is_branch_point:
            return
        rollout.tool_entropies.append(entropy)
        if rollout.pending is not None:
            rollout.pending.append((call, entropy))
        else:
            self._decide(rollout, call, entropy)

    def _decide(self, rollout: _Rollout, call: RecordedCall, entropy: float) -> None:
        """Draw the branches at a branch point, and start them."""
        if not rollout.budget:
            return
        assert rollout.entropy_at_start is not None
        section, change = self._branching.section, entropy - rollout.entropy_at_start
        probability = compute_branch_probability(section, change=change, num_consecutive=rollout.num_consecutive)
        rng = random.Random(derive_seed(self._seed, rollout.run_index, call.index))
        num_drawn = sum(rng.random() < probability for _ in range(section.beam - 1))
        num_branches = min(num_drawn, rollout.budget)
        stats = self._branching.stats
        stats.probabilities.append(probability)
        stats.changes.append(change)
        stats.counts["branched_rollouts"] += num_branches
        rollout.num_consecutive = rollout.num_consecutive + 1 if num_branches else 0
        point = rollout.record.build_point(rollout.run_index, call)
        for share in divide_budget(rollout.budget, num_branches):
            branch = self._open(rollout.next_index, rollout.next_index + share, point)
            branch.entropy_at_start, branch.num_consecutive = rollout.entropy_at_start, rollout.num_consecutive
            rollout.next_index += share
            self._start(branch)

    def _raise_error(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()
