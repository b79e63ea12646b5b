"""Counts of branching rollouts, as metrics of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import fmean

from tunesmith.rollout.recording.replay import RolloutRecord


@dataclass(slots=True, kw_only=True)
class BranchingStats:
    """What happened since the last `take`; other ranks send theirs to the first one."""

    counts: Counter[str] = field(default_factory=Counter)
    probabilities: list[float] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)
    initial: list[int] = field(default_factory=list)

    def add_group(self, num_initial: int) -> None:
        """A group with this many initial rollouts."""
        self.initial.append(num_initial)

    def add_decision(self, *, probability: float, change: float, num_branches: int) -> None:
        """A branch point at which the rollout had rollouts to give away."""
        self.probabilities.append(probability)
        self.changes.append(change)
        self.counts["branched_rollouts"] += num_branches

    def add_fresh(self) -> None:
        """A rollout from the task with what an ended rollout did not give to branches."""
        self.counts["fresh_rollouts"] += 1

    def add_record(self, record: RolloutRecord) -> None:
        """A finished rollout: what it received from its parent."""
        turns = record.inherited_turns
        self.counts["inherited_turns"] += len(turns)
        self.counts["inherited_tokens"] += sum(len(turn.sampled_ids) for turn in turns)
        self.counts["inherited_tool_calls"] += record.tools.num_inherited
        self.counts["repeated_tool_calls"] += record.tools.num_repeated
        self.counts["branch_prefill_tokens"] += record.num_prefill_tokens

    def take(self) -> BranchingStats:
        """What was counted since the last call; counting starts anew."""
        taken = replace(self)
        self.counts, self.probabilities, self.changes, self.initial = Counter(), [], [], []
        return taken

    def add(self, taken: BranchingStats) -> None:
        """Add what another rank has counted."""
        self.counts.update(taken.counts)
        self.probabilities += taken.probabilities
        self.changes += taken.changes
        self.initial += taken.initial

    def compute(self) -> dict[str, float]:
        """Metrics since the last call."""
        taken = self.take()
        counts = taken.counts
        metrics = {
            "rollout/num_branch_points": float(len(taken.probabilities)),
            "rollout/num_branched_rollouts": float(counts["branched_rollouts"]),
            "rollout/num_fresh_rollouts": float(counts["fresh_rollouts"]),
            "rollout/num_inherited_turns": float(counts["inherited_turns"]),
            "rollout/num_inherited_tokens": float(counts["inherited_tokens"]),
            "rollout/num_inherited_tool_calls": float(counts["inherited_tool_calls"]),
            "rollout/num_repeated_tool_calls": float(counts["repeated_tool_calls"]),
            "rollout/num_branch_prefill_tokens": float(counts["branch_prefill_tokens"]),
        }
        if taken.initial:
            metrics["rollout/initial_rollouts_mean"] = fmean(taken.initial)
        if taken.probabilities:
            metrics["rollout/branch_probability_mean"] = fmean(taken.probabilities)
            metrics["rollout/branch_entropy_change_mean"] = fmean(taken.changes)
        return metrics
