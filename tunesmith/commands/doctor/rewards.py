"""Checks of what is trained: groups without variance, rewards that fall or stay; and of held-out evaluations: gains
within their intervals, overfitting.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import numpy as np

from tunesmith.commands.doctor.record import (
    CheckFinding,
    Evidence,
    NotRecordedError,
    Outcome,
    RlRun,
    Severity,
    compute_slope_t,
    find_best_window,
    need_ends,
    observe,
    split_ends,
)
from tunesmith.commands.eval.sample_scores import Difference, compare_known
from tunesmith.config import RunConfig
from tunesmith.monitor.metrics_file import Series

MAX_EQUAL_SHARE = 0.75
"""Half of the groups without variance is usual in good runs; at three quarters most of the sampling is wasted."""
ALL_EQUAL_SHARE = 0.999
NUM_READ_STEPS = 3
"""Rollouts of this number of steps are read to find out why rewards are equal."""
CAUSE_SHARE = 0.7
"""A cause is named if it explains this share of the equal groups."""
MAX_REFILL_BUDGET = 4.0
MAX_GROUP_SIZE = 32
SIGNIFICANT_T = 3.0
"""A trend counts from three standard errors on: with dozens of runs and metrics, two occur by chance."""
SOLVED_REWARD = 0.8
"""Share of the way from the lowest to the highest reward from which a policy may be certain."""
FLAT_T = 1.0
MIN_FLAT_STEPS = 50
"""Fewer steps without progress are usual at the learning rates of reinforcement learning."""
MIN_FALL = 0.2
"""Share of the range of rewards by which the mean must fall."""
STEADY_SELECTORS = ("shuffle", "random", "sequential")
"""Selectors that do not choose by difficulty, so that rewards of different steps can be compared."""

Cause = Literal["identical", "constant", "low", "high", "mixed", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualGroups:
    """Why the rewards of groups are equal, in a few recent steps."""

    cause: Cause
    lowest: float
    evidence: Evidence


def find_equal_rewards(run: RlRun) -> Outcome:
    """Groups whose rollouts all have one reward give no gradient."""
    useful, share = run.need("experience/num_useful_groups").recent, compute_equal_share(run)
    if share < MAX_EQUAL_SHARE:
        return f"{share:.0%} of recent groups have equal rewards"
    groups = explain_equal_groups(run)
    is_solved = groups.cause == "high" and has_risen(run)
    severity: Severity = "note" if is_solved else "error" if share > ALL_EQUAL_SHARE else "warning"
    problem, change, settings = describe_cause(run.config, groups)
    if is_solved:
        problem = "the reward has risen until the tasks hold little to learn: all rollouts get the highest reward"
    text = f"{share:.0%} of the groups have equal rewards, {useful.mean:.1f} a step are trained"
    counted = observe(useful, text, share)
    return CheckFinding(
        severity=severity,
        problem=f"{share:.0%} of the groups give no gradient: {problem}",
        evidence=(counted, groups.evidence),
        change=change,
        settings=settings,
    )


def compute_equal_share(run: RlRun) -> float:
    """Share of the recent groups with a reward whose advantages are all zero."""
    tried, useful = (run.need(f"experience/num_{name}").recent for name in ("tasks_tried", "useful_groups"))
    scored = tried.total - (run.sum_recent("algorithm/num_unscored_groups") or 0.0)
    if not scored:
        raise NotRecordedError("algorithm/num_unscored_groups")
    return 1 - useful.total / scored


def has_risen(run: RlRun) -> bool:
    """Whether the mean reward has risen by more than the noise of steps."""
    rewards = run.get("rollout/reward_mean")
    return rewards is not None and split_ends(rewards) is not None and compute_slope_t(rewards) > SIGNIFICANT_T


def explain_equal_groups(run: RlRun) -> EqualGroups:
    """Read a few recent steps and compare the rewards of groups."""
    values: Counter[float] = Counter()
    seen: list[float] = []
    num_identical = 0
    steps = run.rollouts.list_steps()[-NUM_READ_STEPS:]
    for step in steps:
        groups: dict[int, list[tuple[float, str]]] = {}
        for row in run.rollouts.read_table(step, ("group_index", "reward", "turns.sampled_ids")).to_pylist():
            if row["reward"] is not None:
                groups.setdefault(row["group_index"], []).append((row["reward"], repr(row["turns"])))
        for members in groups.values():
            rewards = {reward for reward, _ in members}
            seen += rewards
            if len(rewards) == 1 and len(members) > 1:
                values.update(rewards)
                num_identical += len({tokens for _, tokens in members}) == 1
    if not values:
        return explain_by_metrics(run)
    number, lowest, highest = values.total(), min(seen), max(seen)
    common = ", ".join(f"{count} x {value:g}" for value, count in values.most_common(4))
    observed = f"rewards of {number} equal groups: {common}"
    cause: Cause = "mixed"
    if lowest < highest and values[highest] >= CAUSE_SHARE * number:
        cause = "high"  # sure of right answers, so identical rollouts are no fault
    elif num_identical >= CAUSE_SHARE * number:
        cause, observed = "identical", f"{observed}; all rollouts of {num_identical} groups sampled the same tokens"
    elif lowest == highest:
        cause = "constant"
    elif values[lowest] >= CAUSE_SHARE * number:
        cause = "low"
    evidence = Evidence(source="rollouts/", observed=observed, value=float(number), steps=(steps[0], steps[-1]))
    return EqualGroups(cause=cause, lowest=lowest, evidence=evidence)


def explain_by_metrics(run: RlRun) -> EqualGroups:
    """The same without rollouts, from the mean reward."""
    mean = run.get_recent("rollout/reward_mean")
    low, high = run.get_recent("rollout/reward_min"), run.get_recent("rollout/reward_max")
    if mean is None or low is None or high is None:
        missing = Evidence(source="rollout/reward_mean", observed="no rollout has a reward")
        return EqualGroups(cause="unknown", lowest=math.nan, evidence=missing)
    lowest, highest = float(low.values.min()), float(high.values.max())
    position = 0.5 if lowest == highest else (mean.mean - lowest) / (highest - lowest)
    cause: Cause = "constant" if lowest == highest else "mixed"
    cause = "low" if position < 0.5 - MAX_EQUAL_SHARE / 2 else "high" if position > 0.5 + MAX_EQUAL_SHARE / 2 else cause
    observed = f"{mean.mean:.3g} on average, lowest {lowest:g}, highest {highest:g}"
    evidence = observe(mean, observed, mean.mean)
    return EqualGroups(cause=cause, lowest=lowest, evidence=evidence)


def describe_cause(config: RunConfig, groups: EqualGroups) -> tuple[str, str, dict[str, object]]:
    """The problem, what to change, and knobs with values."""
    size = min(2 * config.algorithm.group_size, max(MAX_GROUP_SIZE, config.algorithm.group_size))
    refill = max(config.experience.refill_budget, min(2 * config.experience.refill_budget, MAX_REFILL_BUDGET))
    temperature = 1.0 if config.model.temperature < 1 else round(1.2 * config.model.temperature, 1)
    selection = (
        "choose tasks of medium difficulty (`tunesmith pass-rate`, then "
        "train_dataset.task_selector.selector_type=difficulty_based)"
    )
    selector: dict[str, object] = {"train_dataset.task_selector.selector_type": "difficulty_based"}
    match groups.cause:
        case "identical":
            problem = f"all rollouts of a task sample the same tokens at model.temperature={config.model.temperature:g}"
            change = f"set model.temperature={temperature:g}, and leave model.top_k and model.top_p at their defaults"
            return problem, change, {"model.temperature": temperature}
        case "constant" if groups.lowest == 0:
            problem = "every reward is 0, so the tasks are too hard or the judge recognizes no right answer"
            change = "print a few responses and correct `judge`; if the answers are wrong, reward partial ones in "
            return problem, change + "`judge`, or fine-tune first with `tunesmith sft`", {}
        case "constant":
            problem = f"every reward is {groups.lowest:g}, so the judge does not distinguish answers, or every task is"
            change = "print a few responses with their rewards and correct `judge`; if all are right, use harder tasks"
            return f"{problem} too easy", change, {}
        case "low":
            problem = "all rollouts of most tasks get the lowest reward: the tasks are too hard for this model"
            change = f"fine-tune first with `tunesmith sft`, reward partial answers in `judge`, {selection}, or set "
            return problem, f"{change}algorithm.group_size={size}", selector | {"algorithm.group_size": size}
        case "high":
            problem = "all rollouts of most tasks get the highest reward: the tasks are too easy for this model"
            return problem, f"use harder tasks, or {selection}", selector
    problem = "the rollouts of a task are rewarded equally, whatever they answer, or are all right or all wrong"
    change = f"check that `judge` looks at the response, {selection}, or replace equal groups by others with "
    settings = selector | {"experience.refill_budget": refill}
    return problem, f"{change}experience.refill_budget={refill:g}", settings


def find_reward_trend(run: RlRun) -> Outcome:
    """Rewards that fall, or stay where they were for many steps."""
    rewards, low, high = (run.need(f"rollout/reward_{name}") for name in ("mean", "min", "max"))
    first, last = need_ends(rewards)
    if any(each.task_selector.selector_type not in STEADY_SELECTORS for each in run.config.training_sets.values()):
        return None
    best = find_best_window(rewards, len(last))
    range_ = float(high.values.max() - low.values.min())
    observed = f"{first.mean:.3g} in the first steps, {last.mean:.3g} in the last"
    evidence = observe(rewards, observed, last.mean)
    rate = run.config.trainer.peak_learning_rate
    error = math.hypot(float(best.values.std()), float(last.values.std())) / math.sqrt(len(last))
    fall = best.mean - last.mean
    if fall > max(MIN_FALL * range_, SIGNIFICANT_T * error):
        return CheckFinding(
            problem=f"the reward has fallen from {best.mean:.3g} to {last.mean:.3g}",
            evidence=(observe(best, f"{best.mean:.3g} at its best"), evidence),
            change=f"resume from a checkpoint at or before step {best.span[1]} under another name with "
            f"trainer.learning_rate={rate / 3:.1g}, and set algorithm.kl_coef=0.001",
            settings={"trainer.learning_rate": rate / 3, "algorithm.kl_coef": 1e-3},
        )
    if len(rewards) >= MIN_FLAT_STEPS and abs(compute_slope_t(rewards)) < FLAT_T and range_ > 0:
        return CheckFinding(
            problem=f"the reward has not changed beyond its noise in {len(rewards)} steps",
            evidence=(evidence,),
            change=f"first change what the other findings name; without any, set trainer.learning_rate={rate * 3:.1g} "
            f"or algorithm.batch_size={2 * run.config.algorithm.batch_size}",
            settings={"trainer.learning_rate": rate * 3, "algorithm.batch_size": 2 * run.config.algorithm.batch_size},
        )
    return observed


def is_solved(run: RlRun) -> bool:
    """Whether the mean reward is near the highest one."""
    mean, low, high = (run.get(f"rollout/reward_{name}") for name in ("mean", "min", "max"))
    if mean is None or low is None or high is None:
        return False
    lowest, highest = float(low.values.min()), float(high.values.max())
    return lowest < highest and mean.recent.mean >= lowest + SOLVED_REWARD * (highest - lowest)


REWARD = re.compile(r"eval/(.+)/reward")


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
               if has_risen(run) else ""),
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
    if before == after:
        return None
    old, new = (load_scores(run, name, int(series.steps[index])) for index in (before, after))
    tasks = sorted(old)
    return compare_known(map(old.get, tasks), map(new.get, tasks), seed=0)


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
