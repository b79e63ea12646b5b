"""Operators on groups, applied between judge and advantages: they filter rollouts, change rewards, or only count.

An operator is a function `(groups, **args) -> (groups, metrics)` that returns one group per input group, in order, with
fewer or changed trajectories; a group without trajectories does not train. The keyword-only parameters `step` and
`total_steps`, if they have no default, are set by the run. A filtered rollout is excluded from the
statistics of its group. Rollouts on disk and the selector's feedback use the groups before the operators.
Metrics are those of one round of a batch: a plain float is averaged over the groups of all rounds; the types in
`tunesmith.metric` define other ways to combine.

An outcome is a metric reported by the workflow or the judge (`experience.outcome_key`), or the judge's reward before
shaping. A pass rate is the mean over rollouts, independent of their number of model calls; failed rollouts are
excluded.

The rewards of agents with tools are computed from what the rollouts recorded: correctness is the outcome, tool calls
are the sum of the metrics `tool_keys`, and the format is right if the metric `format_key` is 1. Tokens are counted in
the recorded turns: those that the policy sampled. A rollout without one of the metrics is an error: an unknown count is
not 0. The efficiency reward compares the rollouts of one task: fewer tool calls and fewer tokens than the group's mean
raise the reward of a right answer, a wrong one gains nothing from being short (ET-Agent, arXiv:2601.06860). ARPO's
reward pays a bonus for a right answer that used every tool (arXiv:2507.19849).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated, Any, Literal

import yaml
from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveInt
from typing_extensions import TypedDict

from tunesmith.data_juicer import apply_recipe
from tunesmith.errors import ConfigError
from tunesmith.metric import Count, Max, Mean, Min
from tunesmith.types import (
    MAX_REWARD,
    TRUNCATED,
    Group,
    Trajectory,
    are_equal,
    compute_outcome,
    is_above,
    is_at_least,
    read_metric,
)


def compute_pass_rates(groups: Sequence[Group], outcome_key: str | None) -> list[float | None]:
    """Per group the mean outcome of its scored rollouts, each clipped to [0, 1]; None if no rollout is scored."""
    return [
        fmean(clip_outcome(compute_outcome(run, outcome_key)) for run in group.scored) if group.scored else None
        for group in groups
    ]


def clip_outcome(outcome: float) -> float:
    """The outcome clipped to [0, 1]; 0 and 1 but for rounding are 0 and 1, so that a solved task has pass rate 1."""
    return 0.0 if not is_above(outcome, 0.0) else 1.0 if not is_above(1.0, outcome) else outcome


OperatorResult = tuple[list[Group], dict[str, float]]
"""Groups and metrics."""
Operator = Callable[..., OperatorResult]

STRICT_MARGIN = 1 / 16
STRICT_EPSILON = 1e-3


class Shaping(TypedDict):
    """One reward shaping term: `reward <op_type> weight * metric`."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    stats_key: str
    op_type: Literal["ADD", "SUB", "MUL", "DIV"]
    weight: float


def pass_rate_calculator(groups: Sequence[Group], *, outcome_key: str | None = None) -> OperatorResult:
    """Measure the share of tasks that are neither solved nor failed by all their rollouts; groups are unchanged."""
    rates = [rate for rate in compute_pass_rates(groups, outcome_key) if rate is not None]
    if not rates:
        return list(groups), {}
    low, high = STRICT_MARGIN + STRICT_EPSILON, 1 - STRICT_MARGIN - STRICT_EPSILON
    return list(groups), {
        "pass_rate_mean": average(rates),
        "valid_ratio": average([0 < rate < 1 for rate in rates]),
        "strict_valid_ratio": average([low < rate < high for rate in rates]),
        "below_1_ratio": average([rate < 1 for rate in rates]),
        "above_0_ratio": average([rate > 0 for rate in rates]),
        "below_15_16_ratio": average([rate < high for rate in rates]),
        "above_1_16_ratio": average([rate > low for rate in rates]),
    }


def reward_filter(groups: Sequence[Group], *, threshold: float = 0.0) -> OperatorResult:
    """Keep rollouts whose reward is at least `threshold`."""
    return _keep_runs(groups, lambda run: run.reward is not None and is_at_least(run.reward, threshold))


def invalid_reward_filter(groups: Sequence[Group]) -> OperatorResult:
    """Keep rollouts with a reward within 1e9 of 0: failures and rewards that shaping made infinite are dropped."""
    return _keep_runs(groups, lambda run: run.reward is not None and abs(run.reward) <= MAX_REWARD)


def reward_std_filter(groups: Sequence[Group], *, threshold: NonNegativeFloat = 0.0) -> OperatorResult:
    """Keep groups of two or more scored rollouts whose reward standard deviation (population) exceeds `threshold`."""

    def has_spread(group: Group) -> bool:
        rewards = [run.reward for run in group.scored if run.reward is not None]
        return not are_equal(rewards) and pstdev(rewards) > threshold

    return _keep_groups(groups, has_spread)


def outcome_gate(
    groups: Sequence[Group], *, outcome_key: str | None = None, tolerance: NonNegativeFloat = 0.0
) -> OperatorResult:
    """Keep groups whose outcomes differ by more than `tolerance`; with equal outcomes only shaping noise would train.

    A group with one scored rollout cannot be compared and is kept.
    """

    def differs(group: Group) -> bool:
        outcomes = [compute_outcome(run, outcome_key) for run in group.scored]
        return len(outcomes) == 1 or (len(outcomes) > 1 and is_above(max(outcomes), min(outcomes) + tolerance))

    return _keep_groups(groups, differs)


def dapo_dynamic_sampling(
    groups: Sequence[Group], *, metric_key: str | None = None, correct_threshold: float = 0.0
) -> OperatorResult:
    """Keep groups in which some rollouts are correct and some are not (Yu et al., 2025, eq. 11).

    A rollout is correct when its metric `metric_key` (default `accuracy`), or its reward when it does not report that
    metric, exceeds the threshold. With `experience.refill_budget` above 1, other tasks replace the dropped groups.
    """
    key = "accuracy" if metric_key is None else metric_key

    def is_correct(run: Trajectory) -> bool:
        value = run.metrics.get(key, run.reward)
        return value is not None and is_above(value, correct_threshold)

    return _keep_groups(groups, lambda group: len({is_correct(run) for run in group.scored}) == 2)


def mask_response_truncated(groups: Sequence[Group]) -> OperatorResult:
    """Exclude turns truncated by `max_tokens` or by the context from training; their rollout's reward still counts."""
    num_masked = 0

    def mask(run: Trajectory) -> Trajectory:
        nonlocal num_masked
        num_masked += sum(turn.stop_reason in TRUNCATED for turn in run.turns)
        turns = (replace(turn, is_trained=False) if turn.stop_reason in TRUNCATED else turn for turn in run.turns)
        return replace(run, turns=tuple(turns))

    return [group.map(mask) for group in groups], {"num_masked_turns": Count(num_masked)}


def reward_shaping_mapper(
    groups: Sequence[Group], *, reward_shaping_configs: Annotated[list[Shaping], Field(min_length=1)]
) -> OperatorResult:
    """Shape rewards with metrics that rollouts report.

    A term whose metric the rollout does not report, or that divides by zero, is skipped and counted.
    """
    differences: list[float] = []
    num_skipped = 0

    def shape(run: Trajectory) -> Trajectory:
        nonlocal num_skipped
        if run.reward is None:
            return run
        reward = run.reward
        for shaping in reward_shaping_configs:
            shaped = compute_shaped(reward, run.metrics.get(shaping["stats_key"]), shaping)
            num_skipped += shaped is None
            reward = reward if shaped is None else shaped
        differences.append(reward - run.reward)
        return replace(run, reward=reward)

    shaped = [group.map(shape) for group in groups]
    metrics: dict[str, float] = {"num_skipped": Count(num_skipped)}
    if differences:
        metrics |= {
            "reward_diff_mean": average(differences),
            "reward_diff_min": Min(min(differences)),
            "reward_diff_max": Max(max(differences)),
        }
    return shaped, metrics


def compute_shaped(reward: float, value: float | None, shaping: Shaping) -> float | None:
    """The reward after one shaping term, or None if the term cannot be applied."""
    if value is None:
        return None
    amount = shaping["weight"] * value
    match shaping["op_type"]:
        case "ADD":
            return reward + amount
        case "SUB":
            return reward - amount
        case "MUL":
            return reward * amount
        case "DIV":
            return None if amount == 0 else reward / amount


def data_juicer(
    groups: Sequence[Group],
    *,
    config_path: str | None = None,
    operators: list[dict[str, Any]] | None = None,
    prompt_key: str = "question",
    np: PositiveInt = 4,
    python: str | None = None,
) -> OperatorResult:
    """Apply operators of Data-Juicer to scored rollouts: to rows of `prompt_text`, the field `prompt_key` of the task,
    `response_text`, and `reward`. Rollouts that they drop do not train; numbers that they compute are metrics.

    The operators are the `process` of the file `config_path`, or `operators`; `python` is an interpreter with
    Data-Juicer, by default this one.
    """
    process = operators if config_path is None else read_recipe(Path(config_path))
    if not process or (config_path is not None and operators is not None):
        raise ConfigError("operator data_juicer needs config_path, a file with the key process, or operators")
    runs = [run for group in groups for run in group.scored]
    if any(prompt_key not in run.task.row for run in runs):
        raise ConfigError(f"operator data_juicer: tasks have no field {prompt_key!r} (prompt_key)")
    rows = [
        {"prompt_text": str(run.task.row[prompt_key]), "response_text": run.response_text, "reward": run.reward}
        for run in runs
    ]
    kept = apply_recipe(rows, process, text_key="response_text", num_proc=np, python=python)
    scored = {id(runs[each.index]): each.stats for each in kept}

    def add_stats(run: Trajectory) -> Trajectory:
        return replace(run, metrics={**run.metrics, **scored[id(run)]}) if id(run) in scored else run

    changed, metrics = _keep_runs(groups, lambda run: run.reward is None or id(run) in scored)
    metrics["num_failed"] = Count(sum(each.num_failed for each in kept))
    return [group.map(add_stats) for group in changed], metrics


def read_recipe(path: Path) -> list[dict[str, Any]]:
    """The `process` of a file of Data-Juicer."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"config_path={str(path)!r} of operator data_juicer cannot be read: {error}") from error
    return list(found.get("process") or []) if isinstance(found, Mapping) else []


def _keep_runs(groups: Sequence[Group], is_kept: Callable[[Trajectory], bool]) -> OperatorResult:
    kept = [replace(group, trajectories=tuple(filter(is_kept, group.trajectories))) for group in groups]
    num_runs, num_kept = (sum(len(group.trajectories) for group in each) for each in (groups, kept))
    return kept, {"num_filtered_runs": Count(num_runs - num_kept)}


def _keep_groups(groups: Sequence[Group], is_kept: Callable[[Group], bool]) -> OperatorResult:
    kept = [group if is_kept(group) else replace(group, trajectories=()) for group in groups]
    num_groups, num_kept = (sum(bool(group.trajectories) for group in each) for each in (groups, kept))
    return kept, {"num_filtered_groups": Count(num_groups - num_kept)}


Sigma = NonNegativeFloat | Annotated[list[NonNegativeFloat], Field(min_length=1)]
"""One sigma, or one for each curriculum round."""
ToolKeys = Annotated[list[str], Field(min_length=1)]
TOOL_KNOB, FORMAT_KNOB = (f"{key} of the operator in experience.operators" for key in ("tool_keys", "format_key"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """What the rewards need to know of one scored rollout."""

    correctness: float
    """0 for a wrong answer, 1 for a right one, or a score in between such as F1."""
    num_calls: float
    """Tool calls."""
    num_tokens: int
    """Sampled tokens; tool results are not sampled."""
    is_valid: bool = True
    """Whether the format is right."""


def efficiency_reward(
    groups: Sequence[Group],
    *,
    step: int,
    total_steps: int,
    sigma_tool: Sigma = 0.1,
    sigma_length: Sigma = 0.1,
    curriculum_round: PositiveInt = 1,
    decay: Literal["linear", "none"] = "linear",
    outcome_key: str | None = None,
    tool_keys: ToolKeys = ["tool_calls"],  # noqa: B006 - bound arguments are never modified
    format_key: str | None = None,
    format_penalty: NonNegativeFloat = 1.0,
) -> OperatorResult:
    """Replace rewards by correctness * tool factor * length factor, minus `format_penalty` for a wrong format."""
    scale = 1.0 if decay == "none" else compute_sigma_scale(step=step, total_steps=total_steps)
    sigmas = {
        "sigma_tool": scale * choose_sigma("sigma_tool", sigma_tool, curriculum_round),
        "sigma_length": scale * choose_sigma("sigma_length", sigma_length, curriculum_round),
    }
    changed, outcomes, rewards = [], [], []
    for group in groups:
        found = [
            read_outcome(run, outcome_key=outcome_key, tool_keys=tool_keys, format_key=format_key)
            for run in group.scored
        ]
        computed = compute_efficiency_rewards(found, **sigmas, format_penalty=format_penalty)
        changed.append(replace_rewards(group, [reward for reward, *_ in computed]))
        outcomes += found
        rewards += computed
    metrics: dict[str, float] = dict(sigmas)
    if outcomes:
        metrics |= summarize_outcomes(outcomes)
        metrics["tool_factor_mean"] = average([tool_factor for _, tool_factor, _ in rewards])
        metrics["length_factor_mean"] = average([length_factor for *_, length_factor in rewards])
    return changed, metrics


def arpo_reward(
    groups: Sequence[Group],
    *,
    tool_keys: ToolKeys,
    outcome_key: str | None = None,
    format_key: str | None = None,
    bonus: NonNegativeFloat = 0.1,
) -> OperatorResult:
    """Replace rewards by ARPO's: -1 for a wrong format, else correctness, plus `bonus` if every tool was used."""
    outcomes, num_bonuses = [], 0

    def compute_reward(run: Trajectory) -> float:
        nonlocal num_bonuses
        outcome = read_outcome(run, outcome_key=outcome_key, tool_keys=tool_keys, format_key=format_key)
        outcomes.append(outcome)
        has_used_all = all(run.metrics[key] > 0 for key in tool_keys)
        num_bonuses += has_used_all and outcome.is_valid and outcome.correctness > 0
        return compute_arpo_reward(
            correctness=outcome.correctness, is_valid=outcome.is_valid, has_used_all_tools=has_used_all, bonus=bonus
        )

    changed = [replace_rewards(group, list(map(compute_reward, group.scored))) for group in groups]
    metrics = summarize_outcomes(outcomes) if outcomes else {}
    return changed, metrics | {"num_bonuses": Count(num_bonuses)}


def choose_sigma(name: str, sigma: float | list[float], curriculum_round: int) -> float:
    if not isinstance(sigma, list):
        return sigma
    if curriculum_round > len(sigma):
        raise ConfigError(
            f"curriculum_round={curriculum_round}, but {name} lists the sigmas of {len(sigma)} rounds: add one, or set "
            "one number for every round"
        )
    return sigma[curriculum_round - 1]


def read_outcome(
    run: Trajectory, *, outcome_key: str | None, tool_keys: Sequence[str], format_key: str | None
) -> ToolOutcome:
    """The recorded numbers of a scored rollout."""
    correctness = compute_outcome(run, outcome_key)
    if not correctness >= 0:
        source = "the judge's reward" if outcome_key is None else f"the metric {outcome_key!r}"
        raise ConfigError(
            f"the correctness of rollout {run.run_index} of task {run.task.task_id} is {correctness:g}, from {source}: "
            "it must be 0 or more; set outcome_key to a metric that measures it"
        )
    return ToolOutcome(
        correctness=correctness,
        num_calls=sum(read_metric(run, key, knob=TOOL_KNOB) for key in tool_keys),
        num_tokens=run.num_sampled_tokens,
        is_valid=format_key is None or read_metric(run, format_key, knob=FORMAT_KNOB) >= 1,
    )


def replace_rewards(group: Group, rewards: Sequence[float]) -> Group:
    """The group with new rewards of its scored rollouts, in order."""
    remaining = iter(rewards)
    runs = (run if run.reward is None else replace(run, reward=next(remaining)) for run in group.trajectories)
    return replace(group, trajectories=tuple(runs))


def summarize_outcomes(outcomes: Sequence[ToolOutcome]) -> dict[str, float]:
    """Metrics: mean correctness and tool calls, correctness per tool call, and rollouts of wrong format."""
    return {
        "correctness_mean": average([each.correctness for each in outcomes]),
        "tool_calls_mean": average([each.num_calls for each in outcomes]),
        "efficiency": average([each.correctness / max(each.num_calls, 1.0) for each in outcomes]),
        "num_invalid_formats": Count(sum(not each.is_valid for each in outcomes)),
    }


def average(values: Sequence[float]) -> Mean:
    return Mean(math.fsum(values), over=len(values))


def compute_sigma_scale(*, step: int, total_steps: int) -> float:
    """Linear decay over a run: 1 at step 1, 0 at the last step, `max(0, (T - t) / (T - 1))`; 1 in a run of one step."""
    return 1.0 if total_steps <= 1 else max(0.0, (total_steps - step) / (total_steps - 1))


def compute_factor(excess: float, *, sigma: float) -> float:
    """`2 / (1 + exp(sigma * excess))`: 1 for the average rollout, up to 2 below and down to 0 above it."""
    return 1.0 - math.tanh(sigma * excess / 2)  # the same function, which does not overflow


def compute_efficiency_rewards(
    group: Sequence[ToolOutcome], *, sigma_tool: float, sigma_length: float, format_penalty: float = 1.0
) -> list[tuple[float, float, float]]:
    """`correctness * tool factor * length factor`, minus `format_penalty` if the format is wrong; and both factors.

    Tool calls are compared with the group's mean; lengths are standardized in the group by mean and population standard
    deviation, which are 0 for equal lengths.
    """
    if not group:
        return []
    calls, lengths = [each.num_calls for each in group], [each.num_tokens for each in group]
    mean_calls, mean_length = fmean(calls), fmean(lengths)
    std_length = pstdev(lengths) if len(set(lengths)) > 1 else 0.0
    rewards = []
    for each in group:
        tool_factor = compute_factor(each.num_calls - mean_calls, sigma=sigma_tool)
        z_score = (each.num_tokens - mean_length) / std_length if std_length else 0.0
        length_factor = compute_factor(z_score, sigma=sigma_length)
        reward = each.correctness * tool_factor * length_factor - (0.0 if each.is_valid else format_penalty)
        rewards.append((reward, tool_factor, length_factor))
    return rewards


def compute_arpo_reward(*, correctness: float, is_valid: bool, has_used_all_tools: bool, bonus: float = 0.1) -> float:
    """-1 for a wrong format, 0 for a wrong answer, else the correctness, plus `bonus` if every tool was used."""
    if not is_valid:
        return -1.0
    return correctness + bonus if correctness > 0 and has_used_all_tools else correctness
