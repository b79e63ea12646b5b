"""Comparison of several models on the same held-out tasks: estimates with intervals, and paired tests of differences.

Every estimate is a mean over tasks of a task's mean over its rollouts. Pairs of models are compared task by task.
Models keep the order in which they were given, normally that of the training stages; each is compared with every later
one.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from tunesmith.commands.eval.results import MEASURES
from tunesmith.commands.eval.sample_scores import (
    REWARD,
    SAMPLE_STATS,
    TaskScores,
    collect_outcomes,
    compute_pass_at_k_by_task,
    list_reported_metrics,
    scores_to_json,
)
from tunesmith.commands.eval.statistics import Difference, Interval, compare_paired, compute_bootstrap_interval

COUNTS = ("sampled_tokens", "tool_calls", "turns", *MEASURES)
"""Quantities that are counts or ratios, not proportions, even when every value is 0 or 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over tasks."""

    mean: float
    interval: Interval
    """95 % bootstrap interval over tasks."""
    num_tasks: int
    """Tasks on which the quantity is known."""
    is_share: bool
    """Whether the quantity is a proportion: 0 or 1 for every rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResult:
    """One model on one task set."""

    label: str
    path: str
    tasks: Sequence[TaskScores]
    estimates: Mapping[str, Estimate]
    """By name: reward, reported metrics, pass@k, sampled_tokens, tool_calls, turns, truncated."""
    seconds: float
    """Time of the rollouts, without loading the model."""

    @property
    def num_runs(self) -> int:
        return sum(len(task.samples) for task in self.tasks)

    @property
    def num_failures(self) -> int:
        return sum(sample.failure is not None for task in self.tasks for sample in task.samples)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(sample.sampled_tokens for task in self.tasks for sample in task.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """The difference of two models in one quantity."""

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
    scorer: str = ""
    """Which measure a suite scored the tasks by; empty without a suite."""

    def to_json(self) -> dict[str, Any]:
        """The content of comparison.json, with every rollout of every task."""
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
                    "tasks": scores_to_json(result.tasks),
                }
                for label, result in self.results.items()
            },
            "contrasts": [asdict(contrast) for contrast in self.contrasts],
            **({"scorer": self.scorer} if self.scorer else {}),
        }


Comparison = Mapping[str, SetComparison]
"""By the name of the task set."""


def compute_result(
    label: str,
    path: str,
    tasks: Sequence[TaskScores],
    *,
    seed: int,
    seconds: float = 0.0,
    outcome_key: str | None = None,
) -> ModelResult:
    """Estimate every quantity that the scores contain."""
    estimates: dict[str, Estimate] = {}
    for name in (REWARD, *list_reported_metrics(tasks)):
        add_estimate(estimates, name, tasks, seed=seed)
    for k, values in compute_pass_at_k_by_task(collect_outcomes(tasks, outcome_key)).items():
        estimates[f"pass@{k}"] = estimate(values, is_share=True, seed=seed)
    for name in SAMPLE_STATS:
        add_estimate(estimates, name, tasks, seed=seed)
    return ModelResult(label=label, path=path, tasks=tasks, estimates=estimates, seconds=seconds)


def add_estimate(estimates: dict[str, Estimate], name: str, tasks: Sequence[TaskScores], *, seed: int) -> None:
    """Estimate one quantity if any rollout has it."""
    scores = [score for task in tasks if (score := task.compute_mean(name)) is not None]
    if scores:
        is_binary = {sample.get(name) for task in tasks for sample in task.samples} <= {0.0, 1.0, None}
        estimates[name] = estimate(scores, is_share=is_binary and name not in COUNTS, seed=seed)


def estimate(scores: Sequence[float], *, is_share: bool, seed: int) -> Estimate:
    return Estimate(
        mean=statistics.fmean(scores),
        interval=compute_bootstrap_interval(scores, seed=seed),
        num_tasks=len(scores),
        is_share=is_share,
    )


def compare_results(name: str, results: Mapping[str, ModelResult], *, seed: int, scorer: str = "") -> SetComparison:
    """Compare each model with each later one, in the reward and in every reported metric."""
    contrasts = []
    for before, after in combinations(results.values(), 2):
        for quantity in (REWARD, *list_reported_metrics([*before.tasks, *after.tasks])):
            difference = compare_quantity(quantity, before.tasks, after.tasks, seed=seed)
            if difference is not None:
                contrasts.append(Contrast(before=before.label, after=after.label, name=quantity, difference=difference))
    return SetComparison(name=name, results=results, contrasts=contrasts, scorer=scorer)


def compare_quantity(
    name: str, before: Sequence[TaskScores], after: Sequence[TaskScores], *, seed: int
) -> Difference | None:
    """Paired difference over the tasks on which both models have the quantity; None when there is no such task."""
    old_scores = {task.task_id: task.compute_mean(name) for task in before}
    pairs = [
        (old_score, new_score)
        for task in after
        if (old_score := old_scores.get(task.task_id)) is not None
        and (new_score := task.compute_mean(name)) is not None
    ]
    return compare_paired([a for a, _ in pairs], [b for _, b in pairs], seed=seed) if pairs else None
