"""The one place where operators on groups have names, and where they are chained."""

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
    dapo_dynamic_sampling,
    invalid_reward_filter,
    mask_response_truncated,
    outcome_gate,
    pass_rate_calculator,
    reward_filter,
    reward_shaping_mapper,
    reward_std_filter,
)
from tunesmith.metric import Count
from tunesmith.types import Group

OPERATORS: dict[str, Operator] = {
    "pass_rate_calculator": pass_rate_calculator,
    "reward_filter": reward_filter,
    "reward_std_filter": reward_std_filter,
    "outcome_gate": outcome_gate,
    "dapo_dynamic_sampling": dapo_dynamic_sampling,
    "mask_response_truncated": mask_response_truncated,
    "reward_shaping_mapper": reward_shaping_mapper,
    "invalid_reward_filter": invalid_reward_filter,
}
OUTCOME_KEYWORDS = frozenset({"outcome_key", "metric_key"})
"""Arguments of theirs that take `experience.outcome_key` where they are not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundOperator:
    """An operator with its arguments, and the name that its metrics carry."""

    name: str
    apply: Callable[[list[Group]], tuple[list[Group], Mapping[str, float]]]
    awaited: set[str] = field(default_factory=set)
    """Metrics that its arguments name and that no run has reported yet."""


def build_operators(
    section: ExperienceSection, *, load: LoadFunction, own: Sequence[Callable[..., Any]] = ()
) -> list[BoundOperator]:
    """The chain that a section names, and after it the functions that came as objects."""
    check_order([each.name for each in section.operators], outcome_key=section.outcome_key)
    chain: list[BoundOperator] = []
    for each in section.operators:
        operator = find_function(each.name, OPERATORS, load=load, where="operator")
        args, is_own = dict(each.args), each.name not in OPERATORS
        if section.outcome_key is not None:
            keys = {"outcome_key"} if is_own else OUTCOME_KEYWORDS
            args = dict.fromkeys(keys & find_keywords(operator).keys(), section.outcome_key) | args
        bound = bind_arguments(operator, args, where=f"the arguments of operator {each.name!r}")
        awaited = set() if is_own else find_metrics(args)
        chain.append(BoundOperator(name=choose_name(each.name, chain), apply=bound, awaited=awaited))
    for function in own:
        name = getattr(function, "__name__", type(function).__name__)
        bound = bind_arguments(function, {}, where=f"the arguments of operator {name!r}")
        chain.append(BoundOperator(name=choose_name(name, chain), apply=bound))
    return chain


def find_metrics(args: Mapping[str, Any]) -> set[str]:
    """The metrics of runs that an operator's arguments name."""
    named = [args.get(key) for key in OUTCOME_KEYWORDS]
    named += [shaping["stats_key"] for shaping in args.get("reward_shaping_configs", ())]
    return {metric for metric in named if metric is not None}


def check_order(names: Sequence[str], *, outcome_key: str | None) -> None:
    """The gate looks at rewards where no metric is named, so they must not be shaped yet."""
    first_shaping = names.index("reward_shaping_mapper") if "reward_shaping_mapper" in names else len(names)
    if outcome_key is None and "outcome_gate" in names[first_shaping:]:
        raise ConfigError(
            "outcome_gate comes after reward_shaping_mapper and would look at shaped rewards: put it before, or "
            "name a metric in experience.outcome_key"
        )


def choose_name(name: str, chain: Sequence[BoundOperator]) -> str:
    """The last part of a path, numbered from its second use."""
    short = name.replace(":", ".").rpartition(".")[2]
    num_before = sum(each.name == short or each.name.startswith(f"{short}_") for each in chain)
    return short if not num_before else f"{short}_{num_before + 1}"


def apply_operators(
    groups: Sequence[Group], operators: Sequence[BoundOperator]
) -> tuple[list[Group], dict[str, float]]:
    """Run the chain; its numbers go under `experience/<operator>/`."""
    current = list(groups)
    metrics: dict[str, float] = {}
    for operator in operators:
        check_reported(operator, groups)
        changed, numbers = split_result(operator.name, operator.apply(current))
        check_result(operator.name, current, changed)
        current = list(changed)
        metrics |= {f"experience/{operator.name}/{key}": value for key, value in numbers.items()}
    check_rewards(current)
    return current, metrics


def check_reported(operator: BoundOperator, groups: Sequence[Group]) -> None:
    """Refuse a metric that no run reports; once one has, runs without it are the operator's business."""
    runs = [run for group in groups for run in group.scored]
    reported = list(dict.fromkeys(name for run in runs for name in run.metrics))
    operator.awaited.difference_update(reported)
    if runs and operator.awaited:
        metric = min(operator.awaited)
        nearest = suggest_name(metric, reported) if reported else "they report none"
        raise ConfigError(
            f"operator {operator.name!r} goes by the metric {metric!r}, which none of {len(runs)} runs reports "
            f"({nearest}): report it from the workflow or the judge, or change experience.operators"
        )


def split_result(name: str, result: Any) -> tuple[Sequence[Group], dict[str, float]]:
    """Groups and numbers; a ConfigError where a user's operator gave back something else."""
    try:
        groups, numbers = result
        return groups, {key: read_number(value) for key, value in numbers.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"operator {name!r} must give back (groups, numbers by name): {error}") from error


def read_number(value: Any) -> float:
    """A number of a user's operator: an int is a count, a float is averaged, others say by their type what they are."""
    if isinstance(value, int):
        return Count(value)
    return value if isinstance(value, float) else float(value)


def check_rewards(groups: Sequence[Group]) -> None:
    """Refuse rewards that the chain made infinite, or no number, and let through."""
    for group in groups:
        for run in group.trajectories:
            if run.reward is not None and not math.isfinite(run.reward):
                raise ConfigError(
                    f"experience.operators made the reward of run {run.run_index} of task {group.task.task_id} "
                    f"{run.reward}: mend the operator, or put invalid_reward_filter last"
                )


def check_result(name: str, before: Sequence[Group], after: Sequence[Group]) -> None:
    """Refuse what a user's operator gives back when it is not one group for each, of runs and turns that were there."""
    if len(before) != len(after):
        raise ConfigError(
            f"operator {name!r} gave {len(after)} groups for {len(before)}: give back a group without trajectories "
            "for one that is left out"
        )
    for one, other in zip(before, after, strict=True):
        indices = [run.run_index for run in other.trajectories]
        known = [run for run in one.trajectories if run.run_index in indices]
        if one.task.task_id != other.task.task_id or indices != [run.run_index for run in known]:
            raise ConfigError(f"operator {name!r} changed the order of groups or runs, or made up runs")
        for run, changed in zip(known, other.trajectories, strict=True):
            if [turn.sampled_ids for turn in run.turns] != [turn.sampled_ids for turn in changed.turns]:
                raise ConfigError(
                    f"operator {name!r} added, removed or changed turns; to keep one from training, set its is_trained"
                )
