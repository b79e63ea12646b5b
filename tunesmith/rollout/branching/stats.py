"""Counts of branching rollouts, as metrics of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import fmean

from tunesmith.rollout.recording.replay import RolloutRecord

COUNTED = (
    "branched_rollouts", "fresh_rollouts", "inherited_turns", "inherited_tokens", "inherited_tool_calls",
    "repeated_tool_calls", "branch_prefill_tokens",
)  # fmt: skip
"""Names of counters; fresh rollouts start from the task with what an ended rollout did not give to branches."""


@dataclass(slots=True, kw_only=True)
class BranchingStats:
    """What happened since the last `take`; the workers give theirs to the dispatcher."""

    counts: Counter[str] = field(default_factory=Counter)
    """By name, see `COUNTED`."""
    probabilities: list[float] = field(default_factory=list)
    """Of branches, at each branch point at which the rollout had rollouts to give away."""
    changes: list[float] = field(default_factory=list)
    """Of the entropy, at the same branch points."""
    initial: list[int] = field(default_factory=list)
    """Initial rollouts of each group."""

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
        """Add what a worker has counted."""
        self.counts.update(taken.counts)
        self.probabilities += taken.probabilities
        self.changes += taken.changes
        self.initial += taken.initial

    def compute(self) -> dict[str, float]:
        """Metrics of what was counted."""
        metrics = {"rollout/num_branch_points": float(len(self.probabilities))}
        metrics |= {f"rollout/num_{name}": float(self.counts[name]) for name in COUNTED}
        if self.initial:
            metrics["rollout/initial_rollouts_mean"] = fmean(self.initial)
        if self.probabilities:
            metrics["rollout/branch_probability_mean"] = fmean(self.probabilities)
            metrics["rollout/branch_entropy_change_mean"] = fmean(self.changes)
        return metrics
