"""Build the training tasks of a run and their selectors from its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tunesmith.config import DatasetSection, SelectorSection
from tunesmith.errors import ConfigError
from tunesmith.runs.load_function import CustomComponents, load_component
from tunesmith.tasks.selector import Mixture, Selector, TaskFeed
from tunesmith.tasks.table import (
    apply_task_operators,
    build_own_selector,
    build_selector,
    check_selector,
    compute_weights,
)
from tunesmith.types import Task


def build_task_feed(
    sets: Mapping[str, DatasetSection],
    knobs: Mapping[str, str],
    custom: CustomComponents,
    *,
    seed: int,
    load_set: Callable[..., list[Task]],
) -> tuple[TaskFeed, dict[str, float]]:
    """Read the training sets, apply their operators and build their selectors; also return the operators' metrics.

    `knobs` are the names of the sets in the run file; `load_set(section, name=...)` reads one.
    """
    if not sets:
        raise ConfigError("train_dataset is missing: pass a DatasetConfig to tune(), or set train_dataset.path")
    tasks_of: dict[str, list[Task]] = {}
    selectors: dict[str, Selector] = {}
    metrics: dict[str, float] = {}
    for name, section in sets.items():
        load = partial(load_component, knob=f"{knobs[name]}.operators")
        tasks_of[name], counted = apply_task_operators(load_set(section, name=name), section.operators, load=load)
        metrics |= counted if len(sets) == 1 else {f"{metric}/{name}": value for metric, value in counted.items()}
        given, selector_knob = custom.selectors.get(name), f"{knobs[name]}.task_selector"
        selectors[name] = build_set_selector(
            section.task_selector, tasks_of[name], given, seed=seed, knob=selector_knob
        )
    tasks = [task for each in tasks_of.values() for task in each]
    selector = next(iter(selectors.values()))
    if len(sets) > 1:
        sizes = {name: len(each) for name, each in tasks_of.items()}
        weights = compute_weights({name: section.weight for name, section in sets.items()})
        selector = Mixture(selectors, sizes, weights=weights, seed=seed)
    return TaskFeed(tasks, selector), metrics


def build_live_feed(*, batch_size: int, seed: int) -> TaskFeed:
    """Tasks without content, one for each group of a step: each rollout is a live conversation."""
    tasks = [Task(task_id=f"live/{index}", index=index, row={}) for index in range(batch_size)]
    section = SelectorSection(selector_type="sequential")
    selector = build_selector(section, tasks, seed=seed, load=partial(load_component, knob="task_selector"))
    return TaskFeed(tasks, selector)


def build_set_selector(
    section: SelectorSection, tasks: Sequence[Task], given: Any, *, seed: int, knob: str
) -> Selector:
    """The selector of one training set: the caller's object `given`, or the one in the config."""
    if given is None:
        return build_selector(section, tasks, seed=seed, load=partial(load_component, knob=knob))
    if hasattr(given, "select") and not isinstance(given, type):
        return check_selector(given, name=section.selector_type)
    return build_own_selector(given, tasks, section=section, seed=seed if section.seed is None else section.seed)
