"""A selector over several data sets: it chooses the set of each draw; the set's own selector chooses the task.

Without weights the sets are mixed by size: each epoch is a shuffled list in which every set occurs as often as it has
tasks. With weights, the number of draws from each set is proportional to its weight, to within one task, after any
number of draws. Indices run over the concatenation of all sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tunesmith.tasks.selector import ExplainingSelector, ObservingSelector, Selection, Selector, select_indices
from tunesmith.types import Group


class Mixture:
    """A selector over the tasks of several sets."""

    def __init__(
        self,
        selectors: Mapping[str, Selector],
        sizes: Mapping[str, int],
        *,
        weights: Mapping[str, float] | None = None,
        seed: int,
    ) -> None:
        self._names = list(selectors)
        self._selectors = dict(selectors)
        self._sizes = np.asarray([sizes[name] for name in self._names])
        self._first = np.concatenate([[0], np.cumsum(self._sizes)]).tolist()
        self._shares = None
        if weights is not None:
            given = np.asarray([weights[name] for name in self._names], dtype=np.float64)
            self._shares = given / given.sum()
        self._seed = seed
        self._num_drawn_of = np.zeros(len(self._names), dtype=np.int64)
        self._last_sets: set[int] = set()
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    @property
    def num_drawn(self) -> int:
        return int(self._num_drawn_of.sum())

    def select(self, batch_size: int) -> list[int]:
        """The next task indices, in the order in which their sets are drawn."""
        sets = [self._draw_set() for _ in range(batch_size)]
        self._last_sets = set(sets)
        drawn = {
            number: iter(select_indices(self._selector(number), count, num_tasks=int(self._sizes[number])))
            for number, count in Counter(sets).items()
        }
        return [self._first[number] + next(drawn[number]) for number in sets]

    def _draw_set(self) -> int:
        """Choose the set of the next draw and count the draw."""
        if self._shares is None:
            number = self._find_by_size(self.num_drawn)
        else:
            number = int(np.argmax(self._shares * (self.num_drawn + 1) - self._num_drawn_of))
        self._num_drawn_of[number] += 1
        return number

    def _find_by_size(self, position: int) -> int:
        epoch, offset = divmod(position, self._first[-1])
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.repeat(np.arange(len(self._sizes)), self._sizes)
            np.random.default_rng(self._seed + epoch).shuffle(self._order)
        return int(self._order[offset])

    def feedback(self, indices: Sequence[int], pass_rates: Sequence[float]) -> dict[str, float]:
        """Pass each selector the feedback on its own tasks; its metrics get the set's name as a suffix."""
        metrics: dict[str, float] = {}
        rated = list(zip(indices, pass_rates, strict=True))
        for number, name in enumerate(self._names):
            start, end = self._first[number], self._first[number + 1]
            own = [(index - start, rate) for index, rate in rated if start <= index < end]
            set_metrics = self._selector(number).feedback([index for index, _ in own], [rate for _, rate in own])
            metrics |= {f"{key}/{name}": value for key, value in (set_metrics or {}).items()}
        return metrics

    def observe(self, indices: Sequence[int], groups: Sequence[Group]) -> None:
        """Pass the rollouts of each set's tasks to its selector, if it learns from rollouts."""
        for number in range(len(self._names)):
            selector = self._selector(number)
            if not isinstance(selector, ObservingSelector):
                continue
            start, end = self._first[number], self._first[number + 1]
            own = [(index - start, group) for index, group in zip(indices, groups, strict=True) if start <= index < end]
            selector.observe([index for index, _ in own], [group for _, group in own])

    def explain(self) -> Selection:
        """The merged explanations of the selectors that took part in the last `select` and can explain it."""
        selectors = [(number, self._selector(number)) for number in sorted(self._last_sets)]
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
            "selectors": {name: selector.state_dict() for name, selector in self._selectors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._num_drawn_of[:] = state["num_drawn_of"]
        for name, selector in self._selectors.items():
            selector.load_state_dict(state["selectors"][name])

    def _selector(self, number: int) -> Selector:
        return self._selectors[self._names[number]]
