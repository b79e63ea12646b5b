"""Checks of held-out evaluations: gains within their intervals, overfitting, failed evaluation rollouts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import numpy as np

from tunesmith.commands.doctor.finding import CheckFinding, Evidence, Outcome
from tunesmith.commands.doctor.record import RlRun, compute_slope_t
from tunesmith.commands.eval.statistics import Difference, compare_paired
from tunesmith.monitor.metrics_log import Series

REWARD = re.compile(r"eval/(.+)/reward")
RISING_T = 3.0
MIN_TREND_STEPS = 10


def find_evaluation_trend(run: RlRun) -> Outcome:
    """The first task set whose evaluations fall, or do not rise significantly."""
    outcomes = [
        judge_set(run, match[1], series.finite)
        for series in run.metrics.list_series("eval")
        if (match := REWARD.fullmatch(series.name)) and len(series.finite) > 1
    ]
    found = next((each for each in outcomes if isinstance(each, CheckFinding)), None)
    return found or "; ".join(map(str, outcomes)) or None


def judge_set(run: RlRun, name: str, series: Series) -> CheckFinding | str:
    """Compare the last evaluation of a set with the first and with the best one."""
    first, best, last = 0, int(np.argmax(series.values)), len(series) - 1
    gain, loss = compare(run, name, series, first, last), compare(run, name, series, best, last)
    steps, values = series.steps.tolist(), series.values.tolist()
    interval = min(
        run.config.save_interval_steps, run.config.evaluation.interval_steps or run.config.save_interval_steps
    )
    observed = f"{name}: {values[first]:.3f} at step {steps[first]}, {values[last]:.3f} at step {steps[last]}"
    if best != last and loss is not None and loss.interval[1] < 0:
        return CheckFinding(
            problem=f"the held-out reward fell significantly after step {steps[best]}"
            + (", while the training reward rose: the model overfits the tasks or exploits the judge"
               if is_training_rising(run) else ""),
            evidence=(describe(series, name, best, last, loss),),
            change=f"use the checkpoint of step {steps[best]} or the one nearest before it (shorter "
            "save_interval_steps keeps more), read responses with a high reward for tricks, and set "
            "algorithm.kl_coef=0.001",
            settings={"save_interval_steps": interval, "algorithm.kl_coef": 1e-3},
        )  # fmt: skip
    if gain is None:
        return observed
    low, high = gain.interval
    if low <= 0 <= high:
        samples = 4 * run.config.evaluation.num_samples
        return CheckFinding(
            severity="note",
            problem=f"the held-out reward of {name} has not changed significantly between step {steps[first]} and step "
            f"{steps[last]}",
            evidence=(describe(series, name, first, last, gain),),
            change=f"train longer, or narrow the interval with more held-out tasks or evaluation.num_samples={samples}",
            settings={"evaluation.num_samples": samples},
        )
    return f"{observed}, difference {low:+.3f} to {high:+.3f}"


def compare(run: RlRun, name: str, series: Series, before: int, after: int) -> Difference | None:
    """Paired difference of two evaluations on the same tasks; None if the results by task are missing."""
    scores = [load_scores(run, name, int(series.steps[index])) for index in (before, after)]
    shared = sorted(scores[0].keys() & scores[1].keys())
    if before == after or not shared:
        return None
    return compare_paired([scores[0][task] for task in shared], [scores[1][task] for task in shared], seed=0)


def load_scores(run: RlRun, name: str, step: int) -> dict[str, float]:
    """Mean reward by task; empty if the results by task are not on disk."""
    is_stored = step in run.list_evaluated_steps()
    result: Mapping[str, Any] = run.load_evaluation(step).get(name, {}) if is_stored else {}
    scored = {
        task["task_id"]: [reward for reward in task["rewards"] if reward is not None]
        for task in result.get("tasks", ())
    }
    return {task_id: fmean(rewards) for task_id, rewards in scored.items() if rewards}


def describe(series: Series, name: str, before: int, after: int, difference: Difference) -> Evidence:
    first, last = int(series.steps[before]), int(series.steps[after])
    low, high = difference.interval
    return Evidence(
        source=f"eval/step_{last:06d}.json",
        observed=f"{name} {series.values[before]:.3f} -> {series.values[after]:.3f}, difference {difference.mean:+.3f} "
        f"(95 % interval {low:+.3f} to {high:+.3f}) on {difference.num_tasks} tasks",
        value=difference.mean,
        steps=(first, last),
    )


def is_training_rising(run: RlRun) -> bool:
    rewards = run.get("rollout/reward_mean")
    return rewards is not None and len(rewards) >= MIN_TREND_STEPS and compute_slope_t(rewards) > RISING_T
