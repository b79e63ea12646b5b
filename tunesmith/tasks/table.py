"""The tables of selectors and operators on tasks by name.

A built-in selector is built from the features of its tasks; a custom one from the tasks themselves:
`build(tasks, *, seed, **args)`, with `feature_keys` if it takes them. Arguments are checked against the signature.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunesmith.arguments import LoadFunction, bind_arguments, find_function, find_keywords
from tunesmith.config import OperatorSection, SelectorSection
from tunesmith.errors import ConfigError, DataError
from tunesmith.tasks.bots import BotsSelector
from tunesmith.tasks.operators import (
    TaskOperator,
    data_juicer,
    deduplicate,
    length_filter,
    order_by_priority,
    paraphrase,
    read_pass_rate,
    score_difficulty,
    score_quality,
)
from tunesmith.tasks.pareto import ParetoSelector
from tunesmith.tasks.selector import RandomSelector, Selector, build_easy_to_hard, build_sequential, build_shuffle
from tunesmith.types import Task

RESERVED_ARGUMENTS = ("seed", "feature_keys")
"""Arguments of selectors that come from the section itself, not from its `args`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorEntry:
    """A built-in selector and the number of feature columns it takes."""

    build: Callable[..., Selector]
    """Takes the features of the tasks, one row per task, and `seed`; with `has_tasks`, the tasks themselves."""
    has_tasks: bool = False
    min_features: int = 0
    max_features: float = 0


SELECTORS: dict[str, SelectorEntry] = {
    "sequential": SelectorEntry(build=build_sequential),
    "shuffle": SelectorEntry(build=build_shuffle),
    "random": SelectorEntry(build=RandomSelector),
    "offline_easy2hard": SelectorEntry(build=build_easy_to_hard, min_features=1, max_features=math.inf),
    "difficulty_based": SelectorEntry(build=BotsSelector, max_features=math.inf),
    "pareto": SelectorEntry(build=ParetoSelector, has_tasks=True),
}

TASK_OPERATORS: dict[str, TaskOperator] = {
    "deduplicate": deduplicate,
    "length_filter": length_filter,
    "quality_score": score_quality,
    "difficulty_score": score_difficulty,
    "priority_order": order_by_priority,
    "paraphrase": paraphrase,
    "data_juicer": data_juicer,
}


def build_selector(section: SelectorSection, tasks: Sequence[Task], *, seed: int, load: LoadFunction) -> Selector:
    """Build the selector of a section; `seed` is the run's seed, used if the section has none."""
    name, keys = section.selector_type, section.feature_keys
    seed = seed if section.seed is None else section.seed
    where = f"the arguments of selector {name!r}"
    if name not in SELECTORS:
        build = find_function(name, {key: entry.build for key, entry in SELECTORS.items()}, load=load, where="selector")
        return build_own_selector(build, tasks, section=section, seed=seed)
    entry = SELECTORS[name]
    if not entry.min_features <= len(keys) <= entry.max_features:
        needed = f"at least {entry.min_features}" if entry.max_features else "none"
        raise ConfigError(f"selector {name!r} takes {needed} of feature_keys, got {list(keys)}")
    build = bind_arguments(entry.build, section.args, where=where, reserved=RESERVED_ARGUMENTS)
    given: Any = tasks
    if not entry.has_tasks:  # pass rates of reference models in the tasks' rows, one column per key
        rates = [[read_pass_rate(task, key) for key in keys] for task in tasks]
        given = np.asarray(rates, dtype=np.float64).reshape(len(tasks), len(keys))
    selector: Selector = build(given, seed=seed)
    return selector


def build_own_selector(
    build: Callable[..., Any], tasks: Sequence[Task], *, section: SelectorSection, seed: int
) -> Selector:
    """Call a user's class or function and check that the result is a selector."""
    name = section.selector_type
    bound = bind_arguments(
        build, section.args, where=f"the arguments of selector {name!r}", reserved=RESERVED_ARGUMENTS
    )
    available: dict[str, Any] = {"seed": seed, "feature_keys": section.feature_keys}
    accepted = find_keywords(build)
    if section.feature_keys and "feature_keys" not in accepted:
        raise ConfigError(f"selector {name!r} does not take feature_keys: remove them, or add that keyword to it")
    arguments = {key: value for key, value in available.items() if key in accepted}
    return check_selector(bound(tasks, **arguments), name=name)


def check_selector(selector: Any, *, name: str) -> Selector:
    """Refuse an object that lacks a method of `Selector` or whose state is not JSON."""
    methods = ("select", "feedback", "state_dict", "load_state_dict")
    missing = [method for method in methods if not callable(getattr(selector, method, None))]
    if missing:
        raise ConfigError(f"selector {name!r} has no {', '.join(missing)}; a selector has {', '.join(methods)}")
    try:
        json.dumps(selector.state_dict())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"selector {name!r}: its state_dict cannot be saved as JSON: {error}") from error
    checked: Selector = selector
    return checked


def apply_task_operators(
    tasks: Sequence[Task], sections: Sequence[OperatorSection], *, load: LoadFunction
) -> tuple[list[Task], dict[str, float]]:
    """Apply the operators in order; their metrics are named `tasks/<operator>/<metric>`."""
    kept = list(tasks)
    metrics: dict[str, float] = {}
    for section in sections:
        operator = find_function(section.name, TASK_OPERATORS, load=load, where="operator on tasks")
        bound = bind_arguments(operator, section.args, where=f"the arguments of operator {section.name!r}")
        kept, operator_metrics = bound(kept)
        metrics |= {f"tasks/{section.name}/{key}": value for key, value in operator_metrics.items()}
        if not kept:
            raise DataError(f"operator {section.name!r} left no tasks; loosen its arguments {dict(section.args)}")
    return kept, metrics


def compute_weights(weights: Mapping[str, float | None]) -> dict[str, float] | None:
    """Weights of a mixture, or None to mix by size; weights for only some of the sets are an error."""
    given = {name: weight for name, weight in weights.items() if weight is not None}
    if given and len(given) < len(weights):
        missing = [name for name in weights if name not in given]
        raise ConfigError(f"train_datasets.{missing[0]}.weight is missing: give every set a weight, or none")
    return given or None
