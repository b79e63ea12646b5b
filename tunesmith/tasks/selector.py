"""Selectors choose the tasks of the next step: batches of indices into a list of N tasks.

A selector receives the pass rates of the selected tasks before it selects again. Its state is JSON, so a resumed run
makes the same selections. The selectors in this file ignore feedback: their choices depend on the seed and the number
of tasks selected. They receive the features of the tasks only, one row per task.

Axes: N tasks, K feature columns.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tunesmith.errors import ConfigError
from tunesmith.types import Group

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


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


class OrderedSelector:
    """Iterates over all tasks in an order built per epoch; a batch may cross the end of an epoch."""

    def __init__(self, num_tasks: int, build_order: Callable[[int], Indices]) -> None:
        if num_tasks < 1:
            raise ValueError("a selector needs at least one task")
        self.num_tasks = num_tasks
        self.num_drawn = 0
        self._build_order = build_order
        self._epoch = -1
        self._order_N: Indices = np.empty(0, dtype=np.int64)

    def select(self, batch_size: int) -> list[int]:
        """The next `batch_size` indices; wraps around at the end of the data set."""
        indices = [self._find_index(self.num_drawn + offset) for offset in range(batch_size)]
        self.num_drawn += batch_size
        return indices

    def feedback(self, indices: Sequence[int], pass_rates: Sequence[float]) -> dict[str, float]:
        """Ignored: the order is fixed."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"num_drawn": self.num_drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_drawn = state["num_drawn"]

    def _find_index(self, position: int) -> int:
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


class RandomSelector:
    """Tasks drawn uniformly at random, independently for each batch.

    Within a batch tasks are drawn without replacement, unless `replace` is set. A batch larger than the data set
    contains every task before one repeats.
    """

    def __init__(self, features_NK: Floats, *, seed: int, replace: bool = False) -> None:
        self.num_tasks = len(features_NK)
        self.num_drawn = 0
        self._seed = seed
        self._replace = replace

    def select(self, batch_size: int) -> list[int]:
        rng = np.random.default_rng(self._seed + self.num_drawn)
        self.num_drawn += batch_size
        drawn: list[int] = []
        while len(drawn) < batch_size:
            size = batch_size - len(drawn)
            if not self._replace:
                size = min(size, self.num_tasks)
            drawn += rng.choice(self.num_tasks, size, replace=self._replace).tolist()
        return drawn

    def feedback(self, indices: Sequence[int], pass_rates: Sequence[float]) -> dict[str, float]:
        """Ignored: draws are independent of results."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"num_drawn": self.num_drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_drawn = state["num_drawn"]
