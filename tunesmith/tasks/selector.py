"""Which tasks come next: batches of positions in a list of N tasks.

A selector hears the pass rates of what it selected before it is asked again, and its state is what JSON knows, so a run
that resumes selects what it would have selected. The selectors here do not listen: they are functions of the seed and
of how many tasks were drawn. They see of the tasks their features alone, one row a task.

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

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


class Selector(Protocol):
    """What a run needs of a selector, built in or the user's own."""

    def select(self, batch_size: int) -> list[int]:
        """The positions of the next tasks."""
        ...

    def feedback(self, indices: Sequence[int], pass_rates: Sequence[float]) -> Mapping[str, float] | None:
        """Hear how tasks went, each from 0 to 1; tasks of which no run has a score are left out. Returns metrics, if
        there are any."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that decides what comes next, in values that JSON knows."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Why one task was selected."""

    index: int
    reason: str
    numbers: Mapping[str, float]
    """What the reason rests on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What was selected last, and the belief about all tasks at that moment."""

    choices: tuple[Choice, ...]
    summary: Mapping[str, float]
    histogram: tuple[int, ...]
    """Tasks by expected pass rate, in equal bins from 0 to 1."""


def draw_indices(selector: Selector, size: int, *, num_tasks: int) -> list[int]:
    """The next positions, as plain numbers; a ConfigError where a user's selector does not keep to the protocol."""
    given = selector.select(size)
    try:
        indices = [operator.index(index) for index in given]
    except TypeError:
        indices = []
    if len(indices) != size or not all(0 <= index < num_tasks for index in indices):
        raise ConfigError(f"the selector was asked for {size} positions from 0 to {num_tasks - 1} and gave {given!r}")
    return indices


@runtime_checkable
class ExplainingSelector(Selector, Protocol):
    """A selector that can say why; its words go to the run's `selection` folder."""

    def explain(self) -> Selection:
        """What the last `select` did."""
        ...


class OrderedSelector:
    """Serves an order of all tasks, made for each epoch; a batch may straddle the end of one."""

    def __init__(self, num_tasks: int, build_order: Callable[[int], Indices]) -> None:
        if num_tasks < 1:
            raise ValueError("a selector needs at least one task")
        self.num_tasks = num_tasks
        self.num_drawn = 0
        self._build_order = build_order
        self._epoch = -1
        self._order_N: Indices = np.empty(0, dtype=np.int64)

    def select(self, batch_size: int) -> list[int]:
        """The next `batch_size` positions; begins anew at the end of the data set."""
        indices = [self._find_index(self.num_drawn + offset) for offset in range(batch_size)]
        self.num_drawn += batch_size
        return indices

    def feedback(self, indices: Sequence[int], pass_rates: Sequence[float]) -> dict[str, float]:
        """The order does not depend on how tasks go."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"num_drawn": self.num_drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_drawn = state["num_drawn"]

    def _find_index(self, position: int) -> int:
        epoch, place = divmod(position, self.num_tasks)
        if epoch != self._epoch:
            self._epoch, self._order_N = epoch, self._build_order(epoch)
        return int(self._order_N[place])


def build_sequential(features_NK: Floats, *, seed: int) -> OrderedSelector:
    """The data set's order, again in each epoch."""
    order_N = np.arange(len(features_NK))
    return OrderedSelector(len(features_NK), lambda epoch: order_N)


def build_shuffle(features_NK: Floats, *, seed: int) -> OrderedSelector:
    """An order shuffled anew in each epoch: every task once."""
    num_tasks = len(features_NK)
    return OrderedSelector(num_tasks, lambda epoch: np.random.default_rng(seed + epoch).permutation(num_tasks))


def build_easy_to_hard(features_NK: Floats, *, seed: int) -> OrderedSelector:
    """From the highest feature to the lowest: a feature is a pass rate, so the easiest task comes first.

    Later columns break ties of earlier ones; after them the task that is later in the data set comes first.
    """
    order_N = np.lexsort(features_NK.T[::-1])[::-1]
    return OrderedSelector(len(features_NK), lambda epoch: order_N)


class RandomSelector:
    """Tasks drawn at random, each batch independent of the others.

    A task comes at most once in a batch; with `replace` each draw is independent of all others. A batch larger than
    the data set holds every task before it holds one again.
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
        """Chance does not listen."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"num_drawn": self.num_drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_drawn = state["num_drawn"]
