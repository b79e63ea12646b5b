"""Scores of single rollouts and of tasks in an evaluation, without tokens, convertible to and from JSON.

A `SampleScore` describes one rollout of the agent; `TaskScores` holds all rollouts of one task. The value of a quantity
on a task is the mean over the rollouts that have it, or None if none has: a failed rollout has counts but no reward.

Their statistics are bootstrap intervals, paired differences, exact tests and pass@k. Bootstrap resamples are drawn over
tasks, which are independent, never over the rollouts of a task, which are not.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tunesmith.errors import ConfigError, shorten
from tunesmith.types import TRUNCATED, Group, Task, Trajectory

if TYPE_CHECKING:
    from tunesmith.chat.renderer import Renderer

NUM_RESAMPLES = 10_000
MAX_DRAWS_AT_ONCE = 2_000_000
"""Limits the memory of a bootstrap to tens of megabytes."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Paired difference of two models' scores on the same tasks, later minus earlier model."""

    mean: float
    interval: Interval
    """95 % bootstrap interval of the mean difference over tasks."""
    num_better: int
    """Tasks on which the later model scores higher."""
    num_worse: int
    num_tasks: int
    """Tasks on which both models have a score."""
    p_value: float
    """Two-sided and exact: probability of a split of better and worse tasks at least this uneven if both are equally
    likely."""
    test: Literal["McNemar", "sign"]
    """McNemar's test if every score is 0 or 1, the sign test otherwise."""


def compute_bootstrap_interval(scores: Sequence[float], *, seed: int) -> Interval:
    """95 % percentile bootstrap interval of the mean of independent `scores` (Efron, 1979)."""
    values = np.asarray(scores, dtype=np.float64)
    rng = np.random.default_rng(seed)
    num_rows = max(1, MAX_DRAWS_AT_ONCE // len(values))
    means = np.concatenate(
        [
            values[rng.integers(len(values), size=(min(num_rows, NUM_RESAMPLES - start), len(values)))].mean(axis=1)
            for start in range(0, NUM_RESAMPLES, num_rows)
        ]
    )
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def compare_paired(before: Sequence[float], after: Sequence[float], *, seed: int) -> Difference:
    """Compare two models' scores on the same tasks, given in the same order; needs at least one task."""
    differences = [new - old for old, new in zip(before, after, strict=True)]
    num_better, num_worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return Difference(
        mean=math.fsum(differences) / len(differences),
        interval=compute_bootstrap_interval(differences, seed=seed),
        num_better=num_better,
        num_worse=num_worse,
        num_tasks=len(differences),
        p_value=compute_sign_test(num_better, num_worse),
        test="McNemar" if all(score in (0.0, 1.0) for score in (*before, *after)) else "sign",
    )


def compare_known(before: Iterable[float | None], after: Iterable[float | None], *, seed: int) -> Difference | None:
    """`compare_paired` on the tasks on which both have a score; None if there is none."""
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if old is not None and new is not None]
    return compare_paired([old for old, _ in pairs], [new for _, new in pairs], seed=seed) if pairs else None


def compute_sign_test(num_better: int, num_worse: int) -> float:
    """Exact two-sided sign test of better against worse tasks, without ties.

    With scores of 0 and 1 the two counts are the discordant pairs, and this is McNemar's exact test.
    """
    num_pairs, num_rarer = num_better + num_worse, min(num_better, num_worse)
    tail = term = 1
    for count in range(num_rarer):
        term = term * (num_pairs - count) // (count + 1)  # C(n, count + 1); each `math.comb` begins anew
        tail += term
    return min(1.0, 2 * tail / (1 << num_pairs))


def compute_pass_at_k(*, num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased estimate of pass@k from n samples of which c passed: 1 - C(n-c, k) / C(n, k) (Chen et al., 2021,
    eq. 1)."""
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs k from 1 to the number of samples, {num_samples}")
    return 1.0 - float(Fraction(math.comb(num_samples - num_passed, k), math.comb(num_samples, k)))


def choose_pass_at_k(num_samples: int) -> tuple[int, ...]:
    """The k for which pass@k is reported: 1, 2, 4, ... and the number of samples itself."""
    powers = {2**exponent for exponent in range(num_samples.bit_length())}
    return tuple(sorted(powers | {num_samples}))


MAX_FIELD_CHARS = 2000
"""Longer text of a task's row is cut in the results of evaluations."""
REWARD = "reward"
SAMPLE_STATS = ("sampled_tokens", "tool_calls", "turns", "truncated")
"""Quantities that every rollout has, a failed one included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleScore:
    """One rollout of the agent on a task. The field names are keys of comparison.json."""

    reward: float | None
    metrics: Mapping[str, float]
    """Metrics reported by the workflow and the judge."""
    failure: str | None
    response: str
    sampled_tokens: int
    tool_calls: int
    """Tool calls that the workflow reports as its metric `tool_calls`, else well-formed calls in the sampled text."""
    turns: int
    truncated: bool
    """Whether max_tokens, the context or a deadline ended a turn."""

    def get(self, name: str) -> float | None:
        """A quantity by its name in the tables; None when this rollout does not have it."""
        if name == REWARD:
            return self.reward
        if name in SAMPLE_STATS:
            return float(getattr(self, name))
        return None if self.failure is not None else self.metrics.get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScores:
    """A task and the scores of its rollouts."""

    task_id: str
    samples: tuple[SampleScore, ...]
    row: Mapping[str, Any] | None = None
    """The task's row as JSON values; None in files that were written without it."""

    def compute_mean(self, name: str) -> float | None:
        """Mean of a quantity over the rollouts that have it."""
        values = [value for sample in self.samples if (value := sample.get(name)) is not None]
        return statistics.fmean(values) if values else None


def score_groups(groups: Sequence[Group], renderer: Renderer) -> list[TaskScores]:
    """One `TaskScores` for each group of an evaluation."""
    return [
        TaskScores(
            task_id=group.task.task_id,
            samples=tuple(score_trajectory(each, renderer) for each in group.trajectories),
            row=describe_row(group.task),
        )
        for group in groups
    ]


def describe_row(task: Task) -> dict[str, Any]:
    """The row of a task as JSON values, with long text cut."""
    row: dict[str, Any] = json.loads(json.dumps(dict(task.row), default=str))
    return {name: shorten(each, MAX_FIELD_CHARS) if isinstance(each, str) else each for name, each in row.items()}


def score_trajectory(trajectory: Trajectory, renderer: Renderer) -> SampleScore:
    return SampleScore(
        reward=trajectory.reward,
        metrics={name: float(value) for name, value in trajectory.metrics.items()},
        failure=None if trajectory.failure is None else f"{trajectory.failure.where}: {trajectory.failure.message}",
        response=trajectory.response_text,
        sampled_tokens=trajectory.num_sampled_tokens,
        tool_calls=count_tool_calls(trajectory, renderer),
        turns=len(trajectory.turns),
        truncated=any(turn.stop_reason in TRUNCATED for turn in trajectory.turns),
    )


def count_tool_calls(trajectory: Trajectory, renderer: Renderer) -> int:
    """Number of tool calls: recorded by the workflow, or found in the sampled text by the endpoint's parser."""
    if (recorded := trajectory.metrics.get("tool_calls")) is not None:
        return round(recorded)
    num_calls = 0
    for turn in trajectory.turns:
        parser = renderer.build_parser(turn.prompt_ids, new_call_id=lambda: "call", has_tools=True)
        deltas = (parser.feed(renderer.decode(turn.sampled_ids)), parser.finish())
        num_calls += sum(len(delta.tool_calls) for delta in deltas)
    return num_calls


def scores_to_json(tasks: Sequence[TaskScores]) -> list[dict[str, Any]]:
    """Scores as values that JSON can hold; the key of a task's samples is `attempts`."""
    return [
        {"task_id": task.task_id}
        | ({} if task.row is None else {"row": dict(task.row)})
        | {"attempts": [asdict(sample) for sample in task.samples]}
        for task in tasks
    ]


def scores_from_json(values: Sequence[Mapping[str, Any]]) -> list[TaskScores]:
    return [
        TaskScores(
            task_id=each["task_id"],
            samples=tuple(SampleScore(**sample) for sample in each["attempts"]),
            row=each.get("row"),
        )
        for each in values
    ]


def list_reported_metrics(tasks: Sequence[TaskScores]) -> list[str]:
    """Names of the metrics that workflows and judges reported, in order of first appearance."""
    names = {name: None for task in tasks for sample in task.samples for name in sample.metrics}
    return [name for name in names if name not in (REWARD, *SAMPLE_STATS)]


def collect_outcomes(tasks: Sequence[TaskScores], outcome_key: str | None) -> list[list[float]]:
    """Outcomes of the scored rollouts of each task: the reported metric `outcome_key`, or the reward."""
    outcomes = [[each.get(outcome_key or REWARD) for each in task.samples if each.failure is None] for task in tasks]
    if any(outcome is None for task_outcomes in outcomes for outcome in task_outcomes):
        raise ConfigError(
            f"outcome_key={outcome_key!r} is not reported by every rollout; reported are "
            f"{', '.join(list_reported_metrics(tasks)) or 'no metrics'}"
        )
    return [[outcome for outcome in task_outcomes if outcome is not None] for task_outcomes in outcomes]


def compute_pass_at_k_by_task(outcomes: Sequence[Sequence[float]]) -> dict[int, list[float]]:
    """Map k to pass@k of each task with at least k scored rollouts.

    Empty when no task has two scored rollouts, or when an outcome is neither 0 nor 1.
    """
    num_samples = max((len(task_outcomes) for task_outcomes in outcomes), default=0)
    if num_samples < 2 or not all(outcome in (0.0, 1.0) for task_outcomes in outcomes for outcome in task_outcomes):
        return {}
    return {
        k: [
            compute_pass_at_k(num_samples=len(task_outcomes), num_passed=round(sum(task_outcomes)), k=k)
            for task_outcomes in outcomes
            if len(task_outcomes) >= k
        ]
        for k in choose_pass_at_k(num_samples)
    }
