"""The table of operators on groups by name, and the chain that applies them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunesmith.arguments import LoadFunction, bind_arguments, find_function, find_keywords, suggest_name
from tunesmith.config import ExperienceSection
from tunesmith.errors import ConfigError
from tunesmith.experience.operators import (
    Operator,
    arpo_reward,
    choose_sigma,
    dapo_dynamic_sampling,
    data_juicer,
    efficiency_reward,
    invalid_reward_filter,
    mask_response_truncated,
    outcome_gate,
    pass_rate_calculator,
    reward_filter,
    reward_shaping_mapper,
    reward_std_filter,
)
from tunesmith.metric import Count
from tunesmith.types import MAX_REWARD, Group

FUNCTIONS: tuple[Operator, ...] = (
    pass_rate_calculator, reward_filter, reward_std_filter, outcome_gate, dapo_dynamic_sampling,
    mask_response_truncated, reward_shaping_mapper, invalid_reward_filter, efficiency_reward, arpo_reward, data_juicer,
)  # fmt: skip
OPERATORS = {each.__name__: each for each in FUNCTIONS}
OUTCOME_KEYWORDS = frozenset({"outcome_key", "metric_key"})
"""Operator arguments whose default is `experience.outcome_key`."""
STEP_KEYWORDS = frozenset({"step", "total_steps"})
"""Operator arguments without a default that the run sets: the step, from 1, and the number of steps."""
SHAPING = ("reward_shaping_mapper", "efficiency_reward", "arpo_reward")
"""Operators after which rewards are no longer those of the judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundOperator:
    """An operator with its arguments, and the name under which its metrics are logged."""

    name: str
    apply: Callable[..., tuple[list[Group], Mapping[str, float]]]
    step_keywords: frozenset[str] = frozenset()
    """Keywords of `STEP_KEYWORDS` that the operator takes."""
    unreported: set[str] = field(default_factory=set)
    """Metrics named in its arguments that no rollout has reported yet in the run's first step."""


def build_operators(
    section: ExperienceSection, *, load: LoadFunction, own: Sequence[Callable[..., Any]] = ()
) -> list[BoundOperator]:
    """The operators of a section, then the functions in `own`, which the caller of `tune` passed as objects."""
    check_order([each.name for each in section.operators], outcome_key=section.outcome_key)
    chain: list[BoundOperator] = []
    for each in section.operators:
        operator = find_function(each.name, OPERATORS, load=load, where="operator")
        args, is_own = dict(each.args), each.name not in OPERATORS
        if section.outcome_key is not None:
            keys = {"outcome_key"} if is_own else OUTCOME_KEYWORDS
            args = dict.fromkeys(keys & find_keywords(operator).keys(), section.outcome_key) | args
        chain.append(bind_operator(operator, args, name=each.name, chain=chain, is_own=is_own))
    for function in own:
        name = getattr(function, "__name__", type(function).__name__)
        chain.append(bind_operator(function, {}, name=name, chain=chain, is_own=True))
    return chain


def bind_operator(
    operator: Callable[..., Any], args: Mapping[str, Any], *, name: str, chain: Sequence[BoundOperator], is_own: bool
) -> BoundOperator:
    """The operator with checked arguments; those that the run sets are left open, unless a custom one sets them."""
    required = {key for key, each in find_keywords(operator).items() if each.default is each.empty}
    step_keywords = (STEP_KEYWORDS & required) - (args.keys() if is_own else set())
    where = f"the arguments of operator {name!r}"
    bound = bind_arguments(operator, args, where=where, reserved=sorted(step_keywords))
    if operator is efficiency_reward:
        for key in ("sigma_tool", "sigma_length"):  # raises without a sigma for the round
            choose_sigma(key, args.get(key, 0.0), args.get("curriculum_round", 1))
    if operator is data_juicer:
        bound([])  # before a model loads: Data-Juicer knows its operators
    return BoundOperator(
        name=choose_name(name, chain),
        apply=bound,
        step_keywords=step_keywords,
        unreported=set() if is_own else find_metrics(args),
    )


def find_metrics(args: Mapping[str, Any]) -> set[str]:
    """The rollout metrics named in an operator's arguments."""
    named = [args.get(key) for key in (*sorted(OUTCOME_KEYWORDS), "format_key")]
    named += args.get("tool_keys", ())
    named += [shaping["stats_key"] for shaping in args.get("reward_shaping_configs", ())]
    return {metric for metric in named if metric is not None}


def check_order(names: Sequence[str], *, outcome_key: str | None) -> None:
    """Refuse `outcome_gate` after reward shaping when it would compare rewards instead of a metric."""
    first_shaping = next((index for index, name in enumerate(names) if name in SHAPING), len(names))
    if outcome_key is None and "outcome_gate" in names[first_shaping:]:
        shaping = names[first_shaping]
        raise ConfigError(
            f"outcome_gate comes after {shaping} and would compare shaped rewards: put it before {shaping}, or set "
            "experience.outcome_key to a metric"
        )


def choose_name(name: str, chain: Sequence[BoundOperator]) -> str:
    """The last part of a dotted path, with a suffix _2, _3, ... from its second use on."""
    chosen = short = name.replace(":", ".").rpartition(".")[2]
    taken, number = {each.name for each in chain}, 1
    while chosen in taken:
        number += 1
        chosen = f"{short}_{number}"
    return chosen


def apply_operators(
    groups: Sequence[Group], operators: Sequence[BoundOperator], *, step: int = 1, total_steps: int = 1
) -> tuple[list[Group], dict[str, float]]:
    """Apply the chain in step 1, 2, ...; metrics are named `experience/<operator>/<metric>`."""
    current, position = list(groups), {"step": step, "total_steps": total_steps}
    metrics: dict[str, float] = {}
    for operator in operators:
        if step == 1:  # by the number of the step, so that a resumed run raises where the whole one does
            check_reported(operator, groups, current)
        changed, operator_metrics = split_result(
            operator.name, operator.apply(current, **{key: position[key] for key in operator.step_keywords})
        )
        check_result(operator.name, current, changed)
        current = list(changed)
        metrics |= {f"experience/{operator.name}/{key}": value for key, value in operator_metrics.items()}
    check_rewards(current)
    return current, metrics


def check_reported(operator: BoundOperator, groups: Sequence[Group], current: Sequence[Group]) -> None:
    """Refuse a metric that neither a rollout nor an operator before reports in the run's first step; in later steps,
    and in later rounds of the first one, it may be missing."""
    runs = [run for group in groups for run in group.scored]
    reported = list(
        dict.fromkeys(name for group in (*groups, *current) for run in group.scored for name in run.metrics)
    )
    operator.unreported.difference_update(reported)
    if runs and operator.unreported:
        metric = min(operator.unreported)
        nearest = suggest_name(metric, reported) if reported else "they report none"
        raise ConfigError(
            f"operator {operator.name!r} uses the metric {metric!r}, which none of {len(runs)} rollouts reports "
            f"({nearest}): report it from the workflow or the judge, or change experience.operators"
        )


def split_result(name: str, result: Any) -> tuple[Sequence[Group], dict[str, float]]:
    """Groups and metrics of an operator's return value; ConfigError if it is anything else."""
    try:
        groups, metrics = result
        return groups, {key: parse_metric(value) for key, value in metrics.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"operator {name!r} must return (groups, metrics by name): {error}") from error


def parse_metric(value: Any) -> float:
    """A metric of a user's operator: an int is a count; a float is averaged unless it is a type of `metric`."""
    if isinstance(value, int):
        return Count(value)
    return value if isinstance(value, float) else float(value)


def check_rewards(groups: Sequence[Group]) -> None:
    """Refuse infinite, NaN and huge rewards after the chain, as those of a judge are."""
    for group in groups:
        for run in group.trajectories:
            if run.reward is not None and not abs(run.reward) <= MAX_REWARD:
                limit = f" (it must be within {MAX_REWARD:g} of 0)" if math.isfinite(run.reward) else ""
                raise ConfigError(
                    f"after experience.operators the reward of rollout {run.run_index} of task {group.task.task_id} is "
                    f"{run.reward}{limit}: fix the operator, or put invalid_reward_filter last"
                )


def check_result(name: str, before: Sequence[Group], after: Sequence[Group]) -> None:
    """Refuse an operator's result unless it has one group per input group, with rollouts and turns of that group."""
    if len(before) != len(after):
        raise ConfigError(
            f"operator {name!r} returned {len(after)} groups for {len(before)}: to drop a group, return it without "
            "trajectories"
        )
    for one, other in zip(before, after, strict=True):
        indices = [run.run_index for run in other.trajectories]
        known = [run for run in one.trajectories if run.run_index in indices]
        if one.task.task_id != other.task.task_id or indices != [run.run_index for run in known]:
            raise ConfigError(f"operator {name!r} changed the order of groups or rollouts, or added rollouts")
        for run, changed in zip(known, other.trajectories, strict=True):
            if [turn.sampled_ids for turn in run.turns] != [turn.sampled_ids for turn in changed.turns]:
                raise ConfigError(
                    f"operator {name!r} added, removed or changed turns; to exclude a turn from training, set its "
                    "is_trained to False"
                )
