"""Selectors choose the tasks of the next step: batches of indices into a list of N tasks.

A selector receives the pass rates of the selected tasks before it selects again. Its state is JSON, so a resumed run
makes the same selections. `FixedSelector`s receive the features of the tasks only, one row per task.

Axes: N tasks, K feature columns.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from tunesmith.errors import ConfigError
from tunesmith.storage import save_json
from tunesmith.types import Group, Task

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
T = TypeVar("T")
Share = Annotated[float, Field(ge=0, le=1)]
NUM_BINS = 10
"""Bins of the histograms of selections."""


class Selector(Protocol):
    """Interface of selectors, built in or user-defined."""

    def select(self, batch_size: int) -> list[int]:
        """Indices of the next tasks."""
        ...

    def feedback(self, indices: Sequence[int], pass_rates: Sequence[float]) -> Mapping[str, float] | None:
        """Receive the pass rates of tasks, each from 0 to 1; tasks without a scored rollout are omitted. Returns
        metrics or None."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that determines the next selections, as JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Why one task was selected."""

    index: int
    reason: str
    numbers: Mapping[str, float]
    """The values that the reason refers to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The last selection, and a summary of the selector's estimates for all tasks at that moment."""

    choices: tuple[Choice, ...]
    summary: Mapping[str, float]
    histogram: tuple[int, ...]
    """Number of tasks per bin of expected pass rate, in equal bins from 0 to 1."""


def build_histogram(values: Floats) -> tuple[int, ...]:
    """How many values are in each of `NUM_BINS` equal bins from 0 to 1."""
    bins = np.clip((values * NUM_BINS).astype(np.int64), 0, NUM_BINS - 1)
    return tuple(np.bincount(bins, minlength=NUM_BINS).tolist())


def select_indices(selector: Selector, size: int, *, num_tasks: int) -> list[int]:
    """The next `size` indices as ints; ConfigError if a custom selector violates the interface."""
    selected = selector.select(size)
    try:
        indices = [operator.index(index) for index in selected]
    except TypeError:
        indices = []
    if len(indices) != size or not all(0 <= index < num_tasks for index in indices):
        raise ConfigError(f"the selector must return {size} indices from 0 to {num_tasks - 1}, got {selected!r}")
    return indices


@runtime_checkable
class ExplainingSelector(Selector, Protocol):
    """A selector that explains its choices; explanations are saved in the run's `selection` folder."""

    def explain(self) -> Selection:
        """The choices of the last `select` and their reasons."""
        ...


@runtime_checkable
class ObservingSelector(Selector, Protocol):
    """A selector that learns more from rollouts than their pass rates."""

    def observe(self, indices: Sequence[int], groups: Sequence[Group]) -> None:
        """Receive the rollouts of each selected task, before its pass rate: those before operators on groups."""
        ...


class FixedSelector:
    """A selector that ignores feedback: its choices depend on the seed and the number of tasks selected."""

    num_drawn = 0

    def feedback(self, indices: Sequence[int], pass_rates: Sequence[float]) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"num_drawn": self.num_drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_drawn = state["num_drawn"]


class OrderedSelector(FixedSelector):
    """Iterates over all tasks in an order built per epoch; a batch may cross the end of an epoch."""

    def __init__(self, num_tasks: int, build_order: Callable[[int], Indices]) -> None:
        if num_tasks < 1:
            raise ValueError("a selector needs at least one task")
        self.num_tasks = num_tasks
        self._build_order = build_order
        self._epoch = -1
        self._order_N: Indices = np.empty(0, dtype=np.int64)

    def select(self, batch_size: int) -> list[int]:
        """The next `batch_size` indices; wraps around at the end of the data set."""
        indices = [self.find_index(self.num_drawn + offset) for offset in range(batch_size)]
        self.num_drawn += batch_size
        return indices

    def find_index(self, position: int) -> int:
        """The index at a position in the sequence of all epochs."""
        epoch, offset = divmod(position, self.num_tasks)
        if epoch != self._epoch:
            self._epoch, self._order_N = epoch, self._build_order(epoch)
        return int(self._order_N[offset])


def build_sequential(features_NK: Floats, *, seed: int) -> OrderedSelector:
    """The data set's order in every epoch."""
    order_N = np.arange(len(features_NK))
    return OrderedSelector(len(features_NK), lambda epoch: order_N)


def build_shuffle(features_NK: Floats, *, seed: int) -> OrderedSelector:
    """Every task once per epoch, reshuffled each epoch."""
    num_tasks = len(features_NK)
    return OrderedSelector(num_tasks, lambda epoch: np.random.default_rng(seed + epoch).permutation(num_tasks))


def build_easy_to_hard(features_NK: Floats, *, seed: int) -> OrderedSelector:
    """Sorted by feature, highest first: a feature is a pass rate, so the easiest task comes first.

    Ties are broken by later columns, then by position in the data set, last first.
    """
    order_N = np.lexsort(features_NK.T[::-1])[::-1]
    return OrderedSelector(len(features_NK), lambda epoch: order_N)


class RandomSelector(FixedSelector):
    """Tasks drawn uniformly at random, independently for each batch.

    Within a batch tasks are drawn without replacement, unless `replace` is set. A batch larger than the data set
    contains every task before one repeats.
    """

    def __init__(self, features_NK: Floats, *, seed: int, replace: bool = False) -> None:
        self.num_tasks = len(features_NK)
        self._seed = seed
        self._replace = replace

    def select(self, batch_size: int) -> list[int]:
        rng = np.random.default_rng(self._seed + self.num_drawn)
        self.num_drawn += batch_size
        drawn: list[int] = []
        while len(drawn) < batch_size:
            left = batch_size - len(drawn)
            size = left if self._replace else min(left, self.num_tasks)
            drawn += rng.choice(self.num_tasks, size, replace=self._replace).tolist()
        return drawn


class TaskFeed:
    """The training tasks of a run: selected once or in several rounds of a step, whose pass rates the selector receives
    before the next step. With `rollout.max_staleness` tasks are drawn ahead; a step reports those that it trains."""

    def __init__(self, tasks: Sequence[Task], selector: Selector) -> None:
        self.tasks = tasks
        self.selector = selector
        self.requeued: list[int] = []
        """Tasks that run again, before the selector's next ones: their rollouts were dropped."""
        self._selected: list[int] = []
        self._selections: list[Selection] = []

    def select(self, num_tasks: int) -> list[Task]:
        """The next tasks, run in this step."""
        indices = self.draw(num_tasks)
        self.add_selected(indices)
        return [self.tasks[index] for index in indices]

    def draw(self, num_tasks: int) -> list[int]:
        """Indices of the next tasks, which a step may train later: `add_selected` names those that it does."""
        again, self.requeued = self.requeued[:num_tasks], self.requeued[num_tasks:]
        if len(again) == num_tasks:
            return again
        indices = select_indices(self.selector, num_tasks - len(again), num_tasks=len(self.tasks))
        if isinstance(self.selector, ExplainingSelector):
            self._selections.append(self.selector.explain())
        return again + indices

    def add_selected(self, indices: Sequence[int]) -> None:
        """Tasks of this step, whose pass rates come next."""
        self._selected += indices

    def requeue(self, indices: Sequence[int]) -> None:
        """Let tasks run again, before others."""
        self.requeued += indices

    def give_feedback(
        self, pass_rates: Sequence[float | None], groups: Sequence[Group] | None = None
    ) -> dict[str, float]:
        """Report the pass rates of the tasks selected in this step, in the order of selection; None is not reported.

        `groups`, in the same order, are reported to selectors that learn from rollouts.
        """
        if groups is not None and isinstance(self.selector, ObservingSelector):
            self.selector.observe(self._selected, groups)
        known = [(index, rate) for index, rate in zip(self._selected, pass_rates, strict=True) if rate is not None]
        self._selected = []
        return dict(self.selector.feedback([index for index, _ in known], [rate for _, rate in known]) or {})

    def save_selection(self, path: Path) -> None:
        """Write the choices of this step and their reasons, if the selector explains them."""
        selections, self._selections = self._selections, []
        choices = [
            asdict(choice) | {"task_id": self.tasks[choice.index].task_id}
            for selection in selections
            for choice in selection.choices
        ]
        if choices:
            last = selections[-1]
            save_json(path, {"choices": choices, "summary": dict(last.summary), "histogram": list(last.histogram)})


class Mixture:
    """A selector over several sets: it chooses the set of each draw; the set's own selector chooses the task.

    Without weights each epoch is a shuffled list in which every set occurs as often as it has tasks. With weights, the
    number of draws from each set is proportional to its weight, to within about one task, after any number of draws.
    Indices run over the concatenation of all sets.
    """

    def __init__(
        self,
        selectors: Mapping[str, Selector],
        sizes: Mapping[str, int],
        *,
        weights: Mapping[str, float] | None = None,
        seed: int,
    ) -> None:
        self._names = list(selectors)
        self._selectors = list(selectors.values())
        self._sizes = np.asarray([sizes[name] for name in self._names])
        self._first = np.concatenate([[0], np.cumsum(self._sizes)]).tolist()
        self._shares = None
        if weights is not None:
            given = np.asarray([weights[name] for name in self._names], dtype=np.float64)
            self._shares = given / given.sum()
        self._num_drawn_of = np.zeros(len(self._names), dtype=np.int64)
        self._last_sets: set[int] = set()

        def shuffle_sets(epoch: int) -> Indices:
            order: Indices = np.repeat(np.arange(len(self._sizes)), self._sizes)
            np.random.default_rng(seed + epoch).shuffle(order)
            return order

        self._by_size = OrderedSelector(self._first[-1], shuffle_sets)

    @property
    def num_drawn(self) -> int:
        return int(self._num_drawn_of.sum())

    def select(self, batch_size: int) -> list[int]:
        """The next task indices, in the order in which their sets are drawn."""
        sets = [self._draw_set() for _ in range(batch_size)]
        self._last_sets = set(sets)
        drawn = {
            number: iter(select_indices(self._selectors[number], count, num_tasks=int(self._sizes[number])))
            for number, count in Counter(sets).items()
        }
        return [self._first[number] + next(drawn[number]) for number in sets]

    def _draw_set(self) -> int:
        if self._shares is None:
            number = self._by_size.find_index(self.num_drawn)
        else:
            number = int(np.argmax(self._shares * (self.num_drawn + 1) - self._num_drawn_of))
        self._num_drawn_of[number] += 1
        return number

    def feedback(self, indices: Sequence[int], pass_rates: Sequence[float]) -> dict[str, float]:
        """Pass each selector the feedback on its own tasks; its metrics get the set's name as a suffix."""
        metrics: dict[str, float] = {}
        for number, selector in enumerate(self._selectors):
            set_metrics = selector.feedback(*self._choose_own(number, indices, pass_rates))
            metrics |= {f"{key}/{self._names[number]}": value for key, value in (set_metrics or {}).items()}
        return metrics

    def observe(self, indices: Sequence[int], groups: Sequence[Group]) -> None:
        """Pass the rollouts of each set's tasks to its selector, if it learns from rollouts."""
        for number, selector in enumerate(self._selectors):
            if isinstance(selector, ObservingSelector):
                selector.observe(*self._choose_own(number, indices, groups))

    def _choose_own(self, number: int, indices: Sequence[int], values: Sequence[T]) -> tuple[list[int], list[T]]:
        """The indices in a set, counted from its first task, and their values."""
        start, end = self._first[number], self._first[number + 1]
        own = [(index - start, value) for index, value in zip(indices, values, strict=True) if start <= index < end]
        return [index for index, _ in own], [value for _, value in own]

    def explain(self) -> Selection:
        """The merged explanations of the selectors that took part in the last `select` and can explain it."""
        selectors = [(number, self._selectors[number]) for number in sorted(self._last_sets)]
        parts = [(number, each.explain()) for number, each in selectors if isinstance(each, ExplainingSelector)]
        choices = [
            replace(choice, index=self._first[number] + choice.index)
            for number, part in parts
            for choice in part.choices
        ]
        summary = {
            f"{key}/{self._names[number]}": value for number, part in parts for key, value in part.summary.items()
        }
        histogram = tuple(int(sum(column)) for column in zip(*(part.histogram for _, part in parts), strict=True))
        return Selection(choices=tuple(choices), summary=summary, histogram=histogram)

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_drawn_of": self._num_drawn_of.tolist(),
            "selectors": {name: each.state_dict() for name, each in zip(self._names, self._selectors, strict=True)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._num_drawn_of[:] = state["num_drawn_of"]
        for name, selector in zip(self._names, self._selectors, strict=True):
            selector.load_state_dict(state["selectors"][name])
