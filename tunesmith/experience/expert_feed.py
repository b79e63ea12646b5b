"""Which expert demonstrations a step trains.

The choice depends on the seed and the number of the step only, so a resumed run trains the same ones.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from tunesmith.types import Sample


class ExpertFeed:
    """Whole demonstrations, in a new order on each pass over them."""

    def __init__(self, demonstrations: Sequence[Sequence[Sample]], *, num_per_step: int, seed: int) -> None:
        self._demonstrations = demonstrations
        self._num_per_step = num_per_step
        self._seed = seed

    def draw(self, step: int) -> list[Sample]:
        """The samples of step 1, 2, ...; groups and trajectories count from 0."""
        first = (step - 1) * self._num_per_step
        places = [divmod(place, len(self._demonstrations)) for place in range(first, first + self._num_per_step)]
        orders = {epoch: self._shuffle(epoch) for epoch in {epoch for epoch, _ in places}}
        drawn = [self._demonstrations[orders[epoch][offset]] for epoch, offset in places]
        return [
            replace(sample, group_index=index, trajectory_index=index)
            for index, demonstration in enumerate(drawn)
            for sample in demonstration
        ]

    def _shuffle(self, epoch: int) -> list[int]:
        order = list(range(len(self._demonstrations)))
        random.Random(f"experts-{self._seed}-{epoch}").shuffle(order)
        return order
