"""Which tasks come next: batches of task indices, a function of the seed and of how many were drawn.

Both orders visit every task exactly once an epoch; a batch may straddle the end of one. The state is a counter, so a
run that resumes draws what it would have drawn.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Order = Literal["sequential", "shuffle"]


class TaskSelector:
    """Draws task indices in the data set's order, or in an order shuffled anew each epoch."""

    def __init__(self, num_tasks: int, *, order: Order, seed: int) -> None:
        if num_tasks < 1:
            raise ValueError("a selector needs at least one task")
        self.num_tasks = num_tasks
        self.order = order
        self.seed = seed
        self.num_drawn = 0
        self._epoch = -1
        self._epoch_order: list[int] = []

    def select(self, batch_size: int) -> list[int]:
        """The next `batch_size` indices; begins anew at the end of the data set."""
        indices = [self._find_index(self.num_drawn + offset) for offset in range(batch_size)]
        self.num_drawn += batch_size
        return indices

    def state_dict(self) -> dict[str, int]:
        return {"num_drawn": self.num_drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_drawn = state["num_drawn"]

    def _find_index(self, position: int) -> int:
        epoch, place = divmod(position, self.num_tasks)
        if epoch != self._epoch:
            self._epoch, self._epoch_order = epoch, self._build_order(epoch)
        return self._epoch_order[place]

    def _build_order(self, epoch: int) -> list[int]:
        if self.order == "sequential":
            return list(range(self.num_tasks))
        return [int(index) for index in np.random.default_rng(self.seed + epoch).permutation(self.num_tasks)]
