"""Outcomes of rollouts and pass rates of tasks, used by selectors and by operators that gate groups.

An outcome is a metric reported by the workflow or the judge (`experience.outcome_key`), or the judge's reward before
shaping. A pass rate is the mean over rollouts, independent of their number of model calls; failed rollouts are
excluded.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from tunesmith.arguments import suggest_name
from tunesmith.errors import ConfigError
from tunesmith.types import Group, Trajectory, is_above


def compute_outcome(run: Trajectory, outcome_key: str | None) -> float:
    """The outcome of a scored rollout."""
    assert run.reward is not None
    if outcome_key is None:
        return run.reward
    if outcome_key not in run.metrics:
        reported = ", ".join(run.metrics) or "none"
        raise ConfigError(
            f"outcome_key={outcome_key!r} is not a metric of rollout {run.run_index} of task {run.task.task_id}, which "
            f"reports {reported}: report it from the judge, or change experience.outcome_key"
        )
    return run.metrics[outcome_key]


def read_metric(run: Trajectory, key: str, *, knob: str) -> float:
    """A metric that every scored rollout must report, because an unknown number is not 0; `knob` names it."""
    if key not in run.metrics:
        nearest = suggest_name(key, list(run.metrics)) if run.metrics else "it reports none"
        raise ConfigError(
            f"{key!r} is not a metric of rollout {run.run_index} of task {run.task.task_id} ({nearest}): report it for "
            f"every rollout from the workflow or the judge, or change {knob}"
        )
    return run.metrics[key]


def compute_pass_rates(groups: Sequence[Group], outcome_key: str | None) -> list[float | None]:
    """Per group the mean outcome of its scored rollouts, each clipped to [0, 1]; None if no rollout is scored."""
    return [
        fmean(clip_outcome(compute_outcome(run, outcome_key)) for run in group.scored) if group.scored else None
        for group in groups
    ]


def clip_outcome(outcome: float) -> float:
    """The outcome clipped to [0, 1]; 0 and 1 but for rounding are 0 and 1, so that a solved task has pass rate 1."""
    return 0.0 if not is_above(outcome, 0.0) else 1.0 if not is_above(1.0, outcome) else outcome
