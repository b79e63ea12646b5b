"""Several models on the same held-out tasks: what each scores, and whether the differences are more than chance.

Models keep the order in which they were named, which is that of the phases of training. Every number is a mean over
tasks of a task's mean over its runs; pairs of models are compared task by task.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from tunesmith.pipeline.eval.sample_scores import (
    REWARD,
    SIZES,
    AttemptedTask,
    compute_pass_curve,
    find_outcomes,
    list_reported,
    save_attempts,
)
from tunesmith.pipeline.eval.statistics import Difference, Interval, compare_paired, compute_bootstrap_interval

COUNTS = ("sampled_tokens", "tool_calls", "turns")
"""Numbers that are no shares even where each of them is 0 or 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over tasks."""

    mean: float
    interval: Interval
    """95 % bootstrap interval over tasks."""
    num_tasks: int
    """Tasks that have the number."""
    is_share: bool
    """Whether every run is 0 or 1 in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResult:
    """One model on one task set."""

    label: str
    path: str
    tasks: Sequence[AttemptedTask]
    estimates: Mapping[str, Estimate]
    """By name: reward, what was reported, pass@k, sampled_tokens, tool_calls, turns, truncated."""
    seconds: float
    """Time of the runs, without loading the model."""

    @property
    def num_runs(self) -> int:
        return sum(len(task.attempts) for task in self.tasks)

    @property
    def num_failures(self) -> int:
        return sum(attempt.failure is not None for task in self.tasks for attempt in task.attempts)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(attempt.sampled_tokens for task in self.tasks for attempt in task.attempts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """Two models in one number."""

    before: str
    after: str
    name: str
    difference: Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class SetComparison:
    """All models on one task set."""

    name: str
    results: Mapping[str, ModelResult]
    """By label."""
    contrasts: Sequence[Contrast]

    def to_json(self) -> dict[str, Any]:
        """Everything, with each task's runs."""
        return {
            "models": {
                label: {
                    "path": result.path,
                    "num_tasks": len(result.tasks),
                    "num_runs": result.num_runs,
                    "num_failures": result.num_failures,
                    "num_sampled_tokens": result.num_sampled_tokens,
                    "seconds": result.seconds,
                    "estimates": {name: asdict(each) for name, each in result.estimates.items()},
                    "tasks": save_attempts(result.tasks),
                }
                for label, result in self.results.items()
            },
            "contrasts": [asdict(contrast) for contrast in self.contrasts],
        }


Comparison = Mapping[str, SetComparison]
"""By the name of the task set."""


def compute_result(
    label: str,
    path: str,
    tasks: Sequence[AttemptedTask],
    *,
    seed: int,
    seconds: float = 0.0,
    outcome_key: str | None = None,
) -> ModelResult:
    """Estimate everything that the attempts tell."""
    estimates: dict[str, Estimate] = {}
    for name in (REWARD, *list_reported(tasks)):
        add_estimate(estimates, name, tasks, seed=seed)
    for k, values in compute_pass_curve(find_outcomes(tasks, outcome_key)).items():
        estimates[f"pass@{k}"] = estimate(values, is_share=True, seed=seed)
    for name in SIZES:
        add_estimate(estimates, name, tasks, seed=seed)
    return ModelResult(label=label, path=path, tasks=tasks, estimates=estimates, seconds=seconds)


def add_estimate(estimates: dict[str, Estimate], name: str, tasks: Sequence[AttemptedTask], *, seed: int) -> None:
    """Estimate one number where any run has it."""
    scores = [score for task in tasks if (score := task.score(name)) is not None]
    if scores:
        is_binary = {attempt.find(name) for task in tasks for attempt in task.attempts} <= {0.0, 1.0, None}
        estimates[name] = estimate(scores, is_share=is_binary and name not in COUNTS, seed=seed)


def estimate(scores: Sequence[float], *, is_share: bool, seed: int) -> Estimate:
    return Estimate(
        mean=statistics.fmean(scores),
        interval=compute_bootstrap_interval(scores, seed=seed),
        num_tasks=len(scores),
        is_share=is_share,
    )


def compare_results(name: str, results: Mapping[str, ModelResult], *, seed: int) -> SetComparison:
    """Compare each model with each later one, in the reward and in what is reported."""
    contrasts = []
    for before, after in combinations(results.values(), 2):
        for quantity in (REWARD, *list_reported([*before.tasks, *after.tasks])):
            difference = compare_quantity(quantity, before.tasks, after.tasks, seed=seed)
            if difference is not None:
                contrasts.append(Contrast(before=before.label, after=after.label, name=quantity, difference=difference))
    return SetComparison(name=name, results=results, contrasts=contrasts)


def compare_quantity(
    name: str, before: Sequence[AttemptedTask], after: Sequence[AttemptedTask], *, seed: int
) -> Difference | None:
    """Pair by task; tasks that one of the two has no number of are left out. None when no task is left."""
    old = {task.task_id: task.score(name) for task in before}
    pairs = [
        (old_score, new_score)
        for task in after
        if (old_score := old.get(task.task_id)) is not None and (new_score := task.score(name)) is not None
    ]
    return compare_paired([a for a, _ in pairs], [b for _, b in pairs], seed=seed) if pairs else None
