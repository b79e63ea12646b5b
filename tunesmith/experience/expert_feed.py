"""Choice of the expert demonstrations that a step trains.

It depends on the seed and the step number only, so a resumed run trains the same demonstrations.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from tunesmith.types import Sample


class ExpertFeed:
    """Iterates over whole demonstrations, reshuffled each epoch."""

    def __init__(self, demonstrations: Sequence[Sequence[Sample]], *, num_per_step: int, seed: int) -> None:
        self._demonstrations = demonstrations
        self._num_per_step = num_per_step
        self._seed = seed

    def select(self, step: int) -> list[Sample]:
        """The samples of step 1, 2, ...; group and trajectory indices count from 0."""
        first = (step - 1) * self._num_per_step
        places = [divmod(position, len(self._demonstrations)) for position in range(first, first + self._num_per_step)]
        orders = {epoch: self._shuffle(epoch) for epoch in {epoch for epoch, _ in places}}
        selected = [self._demonstrations[orders[epoch][offset]] for epoch, offset in places]
        return [
            replace(sample, group_index=index, trajectory_index=index)
            for index, demonstration in enumerate(selected)
            for sample in demonstration
        ]

    def _shuffle(self, epoch: int) -> list[int]:
        order = list(range(len(self._demonstrations)))
        random.Random(f"experts-{self._seed}-{epoch}").shuffle(order)
        return order
