"""What feeds a run: its tasks, who selects them, and what the selector hears back.

Within a step tasks are drawn, tried and perhaps drawn again; at its end the selector hears the pass rates of all that
were tried, before it is asked for the next step's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tunesmith.config import RunConfig
from tunesmith.errors import ConfigError
from tunesmith.experience.outcomes import compute_pass_rates
from tunesmith.pipeline.load_function import load_part
from tunesmith.storage import save_json
from tunesmith.tasks.load import load_tasks
from tunesmith.tasks.mixture import Mixture
from tunesmith.tasks.selector import ExplainingSelector, Selection, Selector, draw_indices
from tunesmith.tasks.table import (
    apply_task_operators,
    build_own_selector,
    build_selector,
    check_selector,
    compute_weights,
)
from tunesmith.types import Group, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnParts:
    """What a caller gave as objects and not by name."""

    selectors: Mapping[str, Any] = field(default_factory=dict)
    """By training set: a selector, or a class or function that builds one from the tasks."""
    operators: Sequence[Callable[..., Any]] = ()
    """Applied to the groups of a step after those that the config names."""


class TaskFeed:
    """The training tasks of a run and their selector."""

    def __init__(self, tasks: Sequence[Task], selector: Selector, *, outcome_key: str | None) -> None:
        self.tasks = tasks
        self.selector = selector
        self._outcome_key = outcome_key
        self._drawn: list[int] = []
        self._selections: list[Selection] = []

    def draw(self, num_tasks: int) -> list[Task]:
        """The next tasks."""
        indices = draw_indices(self.selector, num_tasks, num_tasks=len(self.tasks))
        self._drawn += indices
        if isinstance(self.selector, ExplainingSelector):
            self._selections.append(self.selector.explain())
        return [self.tasks[index] for index in indices]

    def give_feedback(self, groups: Sequence[Group]) -> dict[str, float]:
        """Tell the selector how the tasks drawn in this step went; groups come in the order of the draws."""
        rates = compute_pass_rates(groups, self._outcome_key)
        heard = [(index, rate) for index, rate in zip(self._drawn, rates, strict=True) if rate is not None]
        self._drawn = []
        return dict(self.selector.feedback([index for index, _ in heard], [rate for _, rate in heard]) or {})

    def save_selection(self, path: Path) -> None:
        """Write what was chosen in this step and why, where the selector says so."""
        told, self._selections = self._selections, []
        choices = [
            asdict(choice) | {"task_id": self.tasks[choice.index].task_id} for each in told for choice in each.choices
        ]
        if choices:
            last = told[-1]
            save_json(path, {"choices": choices, "summary": dict(last.summary), "histogram": list(last.histogram)})


def build_feed(config: RunConfig, own: OwnParts) -> tuple[TaskFeed, dict[str, float]]:
    """Read the training sets, apply their operators, and build their selectors; also what operators counted."""
    sets = config.training_sets
    if not sets:
        raise ConfigError("train_dataset is missing: give tune() a DatasetConfig, or set train_dataset.path")
    tasks_of: dict[str, list[Task]] = {}
    selectors: dict[str, Selector] = {}
    metrics: dict[str, float] = {}
    for name, section in sets.items():
        key = "train_dataset" if config.train_dataset is not None else f"train_datasets.{name}"
        load = partial(load_part, knob=f"{key}.operators")
        tasks_of[name], counted = apply_task_operators(load_tasks(section, name=name), section.operators, load=load)
        metrics |= counted if len(sets) == 1 else {f"{metric}/{name}": value for metric, value in counted.items()}
        selectors[name] = build_set_selector(config, name, tasks_of[name], own, knob=f"{key}.task_selector")
    tasks = [task for each in tasks_of.values() for task in each]
    selector = next(iter(selectors.values()))
    if len(sets) > 1:
        sizes = {name: len(each) for name, each in tasks_of.items()}
        weights = compute_weights({name: section.weight for name, section in sets.items()})
        selector = Mixture(selectors, sizes, weights=weights, seed=config.seed)
    return TaskFeed(tasks, selector, outcome_key=config.experience.outcome_key), metrics


def build_set_selector(config: RunConfig, name: str, tasks: Sequence[Task], own: OwnParts, *, knob: str) -> Selector:
    """The selector of one training set: the object that the caller gave, or what the config names."""
    section = config.training_sets[name].task_selector
    given = own.selectors.get(name)
    if given is None:
        return build_selector(section, tasks, seed=config.seed, load=partial(load_part, knob=knob))
    if hasattr(given, "select") and not isinstance(given, type):
        return check_selector(given, name=section.selector_type)
    return build_own_selector(given, tasks, section=section, seed=config.seed if section.seed is None else section.seed)
