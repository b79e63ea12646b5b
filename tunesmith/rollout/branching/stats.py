"""Counts of branching rollouts, as metrics of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import fmean

from tunesmith.rollout.recording.replay import RolloutRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchingCounts:
    """What a rank has counted in a round."""

    counts: Counter[str]
    probabilities: list[float]
    changes: list[float]
    initial: list[int]


class BranchingStats:
    """What happened since the last call of `compute`."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._counts: Counter[str] = Counter()
        self._probabilities: list[float] = []
        self._changes: list[float] = []
        self._initial: list[int] = []

    def add_group(self, num_initial: int) -> None:
        """A group with this many initial rollouts."""
        self._initial.append(num_initial)

    def add_decision(self, *, probability: float, change: float, num_branches: int) -> None:
        """A branch point at which the rollout had rollouts to give away."""
        self._probabilities.append(probability)
        self._changes.append(change)
        self._counts["branched_rollouts"] += num_branches

    def add_fresh(self) -> None:
        """A rollout from the task with what an ended rollout did not give to branches."""
        self._counts["fresh_rollouts"] += 1

    def add_record(self, record: RolloutRecord) -> None:
        """A finished rollout: what it received from its parent."""
        turns = record.inherited_turns
        self._counts["inherited_turns"] += len(turns)
        self._counts["inherited_tokens"] += sum(len(turn.sampled_ids) for turn in turns)
        self._counts["inherited_tool_calls"] += record.tools.num_inherited
        self._counts["repeated_tool_calls"] += record.tools.num_repeated
        self._counts["branch_prefill_tokens"] += record.num_prefill_tokens

    def take(self) -> BranchingCounts:
        """What was counted since the last call, for `add`."""
        counts = BranchingCounts(
            counts=self._counts, probabilities=self._probabilities, changes=self._changes, initial=self._initial
        )
        self._clear()
        return counts

    def add(self, taken: BranchingCounts) -> None:
        """Add what another rank has counted."""
        self._counts.update(taken.counts)
        self._probabilities += taken.probabilities
        self._changes += taken.changes
        self._initial += taken.initial

    def compute(self) -> dict[str, float]:
        """Metrics since the last call."""
        counts = self._counts
        metrics = {
            "rollout/num_branch_points": float(len(self._probabilities)),
            "rollout/num_branched_rollouts": float(counts["branched_rollouts"]),
            "rollout/num_fresh_rollouts": float(counts["fresh_rollouts"]),
            "rollout/num_inherited_turns": float(counts["inherited_turns"]),
            "rollout/num_inherited_tokens": float(counts["inherited_tokens"]),
            "rollout/num_inherited_tool_calls": float(counts["inherited_tool_calls"]),
            "rollout/num_repeated_tool_calls": float(counts["repeated_tool_calls"]),
            "rollout/num_branch_prefill_tokens": float(counts["branch_prefill_tokens"]),
        }
        if self._initial:
            metrics["rollout/initial_rollouts_mean"] = fmean(self._initial)
        if self._probabilities:
            metrics["rollout/branch_probability_mean"] = fmean(self._probabilities)
            metrics["rollout/branch_entropy_change_mean"] = fmean(self._changes)
        self._clear()
        return metrics
