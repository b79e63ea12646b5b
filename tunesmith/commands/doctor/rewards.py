"""Checks of rewards: groups without variance, small batches, rewards that fall or stay."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from tunesmith.commands.doctor.finding import Evidence, Finding, Outcome, Passed, Severity
from tunesmith.commands.doctor.record import RlRun
from tunesmith.commands.doctor.series import compute_slope_t, find_best_window, split_ends
from tunesmith.config import RunConfig

MAX_EQUAL_SHARE = 0.75
"""Half of the groups without variance is usual in good runs; at three quarters most of the sampling is wasted."""
ALL_EQUAL_SHARE = 0.999
NUM_READ_STEPS = 3
"""Rollouts of this number of steps are read to find out why rewards are equal."""
CAUSE_SHARE = 0.7
"""A cause is named if it explains this share of the equal groups."""
MIN_GROUPS_PER_UPDATE = 4
"""Below it the gradient of an update is that of a handful of tasks."""
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
    highest: float
    evidence: Evidence


def find_equal_rewards(run: RlRun) -> Outcome:
    """Groups whose rollouts all have one reward give no gradient."""
    share = compute_equal_share(run)
    useful = run.get_recent("experience/num_useful_groups")
    if share is None or useful is None:
        return None
    if share < MAX_EQUAL_SHARE:
        return Passed(check="equal-rewards", figure=f"{share:.0%} of recent groups have equal rewards")
    groups = explain_equal_groups(run)
    is_solved = groups.cause == "high" and has_risen(run)
    severity: Severity = "note" if is_solved else "error" if share > ALL_EQUAL_SHARE else "warning"
    problem, change, settings = describe_cause(run.config, groups)
    if is_solved:
        problem = "the reward has risen until the tasks hold little to learn: all rollouts get the highest reward"
    text = f"{share:.0%} of the groups have equal rewards, {useful.mean:.1f} a step are trained"
    counted = Evidence(source=useful.name, observed=text, value=share, steps=useful.span)
    return Finding(
        check="equal-rewards",
        severity=severity,
        problem=f"{share:.0%} of the groups give no gradient: {problem}",
        evidence=(counted, groups.evidence),
        change=change,
        settings=settings,
    )


def compute_equal_share(run: RlRun) -> float | None:
    """Share of the recent groups with a reward whose advantages are all zero."""
    tried, useful = run.sum_recent("experience/num_tasks_tried"), run.sum_recent("experience/num_useful_groups")
    scored = None if tried is None else tried - (run.sum_recent("algorithm/num_unscored_groups") or 0.0)
    return None if not scored or useful is None else 1 - useful / scored


def has_risen(run: RlRun) -> bool:
    """Whether the mean reward has risen by more than the noise of steps."""
    rewards = run.get("rollout/reward_mean")
    ends = None if rewards is None else split_ends(rewards)
    return rewards is not None and ends is not None and compute_slope_t(rewards) > SIGNIFICANT_T


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
    return EqualGroups(cause=cause, lowest=lowest, highest=highest, evidence=evidence)


def explain_by_metrics(run: RlRun) -> EqualGroups:
    """The same without rollouts, from the mean reward."""
    mean = run.get_recent("rollout/reward_mean")
    low, high = run.get_recent("rollout/reward_min"), run.get_recent("rollout/reward_max")
    if mean is None or low is None or high is None:
        missing = Evidence(source="rollout/reward_mean", observed="no rollout has a reward")
        return EqualGroups(cause="unknown", lowest=math.nan, highest=math.nan, evidence=missing)
    lowest, highest = float(low.values.min()), float(high.values.max())
    position = 0.5 if lowest == highest else (mean.mean - lowest) / (highest - lowest)
    cause: Cause = "constant" if lowest == highest else "mixed"
    cause = "low" if position < 0.5 - MAX_EQUAL_SHARE / 2 else "high" if position > 0.5 + MAX_EQUAL_SHARE / 2 else cause
    observed = f"{mean.mean:.3g} on average, lowest {lowest:g}, highest {highest:g}"
    evidence = Evidence(source=mean.name, observed=observed, value=mean.mean, steps=mean.span)
    return EqualGroups(cause=cause, lowest=lowest, highest=highest, evidence=evidence)


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


def find_small_batch(run: RlRun) -> Outcome:
    """Updates on very few groups, because the others were dropped or minibatches are many."""
    groups, updates = run.sum_recent("experience/num_useful_groups"), run.sum_recent("train/num_updates")
    share, useful = compute_equal_share(run), run.get_recent("experience/num_useful_groups")
    if not groups or not updates or useful is None or share is None:
        return None
    per_update = groups / updates
    configured = run.config.algorithm.batch_size / run.config.trainer.num_minibatches
    observed = f"{per_update:.1f} groups an update; batch_size / num_minibatches is {configured:g}"
    if per_update >= min(MIN_GROUPS_PER_UPDATE, configured / 2) or is_solved(run):
        return Passed(check="small-batch", figure=observed)
    settings: dict[str, float] = {"experience.refill_budget": min(math.ceil(1 / (1 - share)), MAX_REFILL_BUDGET)}
    if run.config.trainer.num_minibatches > 1:
        settings["trainer.num_minibatches"] = 1
    return Finding(
        check="small-batch",
        severity="warning",
        problem=f"an update is computed from {per_update:.1f} groups, since {share:.0%} of the groups give no gradient",
        evidence=(Evidence(source=useful.name, observed=observed, value=per_update, steps=useful.span),),
        change="set " + ", or ".join(f"{knob}={value:g}" for knob, value in settings.items()),
        settings=settings,
    )


def find_reward_trend(run: RlRun) -> Outcome:
    """Rewards that fall, or stay where they were for many steps."""
    rewards = run.get("rollout/reward_mean")
    ends = None if rewards is None else split_ends(rewards)
    low, high = run.get("rollout/reward_min"), run.get("rollout/reward_max")
    if rewards is None or ends is None or low is None or high is None or not chooses_steadily(run):
        return None
    first, last = ends
    best = find_best_window(rewards, len(last))
    range_ = float(high.values.max() - low.values.min())
    observed = f"{first.mean:.3g} in the first steps, {last.mean:.3g} in the last"
    evidence = Evidence(source=rewards.name, observed=observed, value=last.mean, steps=rewards.span)
    rate = run.config.trainer.learning_rate
    error = math.hypot(float(best.values.std()), float(last.values.std())) / math.sqrt(len(last))
    fall = best.mean - last.mean
    if fall > max(MIN_FALL * range_, SIGNIFICANT_T * error):
        best_evidence = Evidence(
            source=rewards.name, observed=f"{best.mean:.3g} at its best", value=best.mean, steps=best.span
        )
        return Finding(
            check="reward-trend",
            severity="warning",
            problem=f"the reward has fallen from {best.mean:.3g} to {last.mean:.3g}",
            evidence=(best_evidence, evidence),
            change=f"resume from a checkpoint at or before step {best.span[1]} under another name with "
            f"trainer.learning_rate={rate / 3:.1g}, and set algorithm.kl_coef=0.001",
            settings={"trainer.learning_rate": rate / 3, "algorithm.kl_coef": 1e-3},
        )
    if len(rewards) >= MIN_FLAT_STEPS and abs(compute_slope_t(rewards)) < FLAT_T and range_ > 0:
        return Finding(
            check="reward-trend",
            severity="warning",
            problem=f"the reward has not changed beyond its noise in {len(rewards)} steps",
            evidence=(evidence,),
            change=f"first change what the other findings name; without any, set trainer.learning_rate={rate * 3:.1g} "
            f"or algorithm.batch_size={2 * _get_batch_size(run)}",
            settings={"trainer.learning_rate": rate * 3, "algorithm.batch_size": 2 * _get_batch_size(run)},
        )
    return Passed(check="reward-trend", figure=observed)


def is_solved(run: RlRun) -> bool:
    """Whether the mean reward is near the highest one."""
    mean, low, high = (run.get(f"rollout/reward_{name}") for name in ("mean", "min", "max"))
    if mean is None or low is None or high is None:
        return False
    lowest, highest = float(low.values.min()), float(high.values.max())
    return lowest < highest and mean.recent.mean >= lowest + SOLVED_REWARD * (highest - lowest)


def chooses_steadily(run: RlRun) -> bool:
    """Whether tasks are chosen independently of their difficulty."""
    sets = run.config.training_sets.values()
    return all(each.task_selector.selector_type in STEADY_SELECTORS for each in sets)


def _get_batch_size(run: RlRun) -> int:
    return run.config.algorithm.batch_size
