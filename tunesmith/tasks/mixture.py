"""Several data sets as one: which set the next task comes from; which task of it, its own selector says.

Without weights the sets are mixed by size: each epoch is a shuffled list in which every set occurs as often as it has
tasks. With weights, every stretch of draws holds each set in proportion, to within one task. Positions count over all
sets, one after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tunesmith.tasks.selector import ExplainingSelector, Selection, Selector, draw_indices


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
        self._last_turns: set[int] = set()
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    @property
    def num_drawn(self) -> int:
        return int(self._num_drawn_of.sum())

    def select(self, batch_size: int) -> list[int]:
        """Positions in the order in which the sets take turns."""
        turns = [self._take_turn() for _ in range(batch_size)]
        self._last_turns = set(turns)
        drawn = {
            turn: iter(draw_indices(self._selector(turn), count, num_tasks=int(self._sizes[turn])))
            for turn, count in Counter(turns).items()
        }
        return [self._first[turn] + next(drawn[turn]) for turn in turns]

    def _take_turn(self) -> int:
        """The number of the set that the next draw comes from, and count the draw."""
        if self._shares is None:
            turn = self._find_by_size(self.num_drawn)
        else:
            turn = int(np.argmax(self._shares * (self.num_drawn + 1) - self._num_drawn_of))
        self._num_drawn_of[turn] += 1
        return turn

    def _find_by_size(self, position: int) -> int:
        epoch, place = divmod(position, self._first[-1])
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.repeat(np.arange(len(self._sizes)), self._sizes)
            np.random.default_rng(self._seed + epoch).shuffle(self._order)
        return int(self._order[place])

    def feedback(self, indices: Sequence[int], pass_rates: Sequence[float]) -> dict[str, float]:
        """Tell each selector of its own tasks; its metrics carry the set's name."""
        metrics: dict[str, float] = {}
        given = list(zip(indices, pass_rates, strict=True))
        for turn, name in enumerate(self._names):
            start, end = self._first[turn], self._first[turn + 1]
            own = [(index - start, rate) for index, rate in given if start <= index < end]
            told = self._selector(turn).feedback([index for index, _ in own], [rate for _, rate in own])
            metrics |= {f"{key}/{name}": value for key, value in (told or {}).items()}
        return metrics

    def explain(self) -> Selection:
        """The words of those selectors that were asked last and give any."""
        told = [(turn, self._selector(turn)) for turn in sorted(self._last_turns)]
        parts = [(turn, one.explain()) for turn, one in told if isinstance(one, ExplainingSelector)]
        choices = [
            replace(choice, index=self._first[turn] + choice.index) for turn, part in parts for choice in part.choices
        ]
        summary = {f"{key}/{self._names[turn]}": value for turn, part in parts for key, value in part.summary.items()}
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

    def _selector(self, turn: int) -> Selector:
        return self._selectors[self._names[turn]]
