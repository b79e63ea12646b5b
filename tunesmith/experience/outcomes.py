"""How well runs did their task: what selectors learn from, and what decides whether a group can teach.

An outcome is a metric that the workflow or the judge reports, or the judge's reward; shaping comes after it. A pass
rate counts runs, however many model calls they made; failed runs are in none.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from tunesmith.errors import ConfigError
from tunesmith.types import Group, Trajectory


def compute_outcome(run: Trajectory, outcome_key: str | None) -> float:
    """The outcome of a scored run."""
    assert run.reward is not None
    if outcome_key is None:
        return run.reward
    if outcome_key not in run.metrics:
        reported = ", ".join(run.metrics) or "none"
        raise ConfigError(
            f"outcome_key={outcome_key!r} is no metric of run {run.run_index} of task {run.task.task_id}, which "
            f"reports {reported}: report it from the judge, or change experience.outcome_key"
        )
    return run.metrics[outcome_key]


def compute_pass_rates(groups: Sequence[Group], outcome_key: str | None) -> list[float | None]:
    """For each group the mean outcome of its scored runs, each clipped to [0, 1]; None without one."""
    return [
        fmean(min(max(compute_outcome(run, outcome_key), 0.0), 1.0) for run in group.scored) if group.scored else None
        for group in groups
    ]
