"""Work of the host while the device computes gradients.

Python's garbage collector stops the host for 10 to 500 ms at a time, at moments that differ between ranks, which wait
for each other. Collected while the device is busy, nothing waits.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

FREEZE_CALL = 3
"""Update after which everything is compiled: what is alive then lives as long as the run."""
FULL_INTERVAL = 10
"""Updates between collections of all generations; the collector would start one by itself after eleven."""


class HostWork:
    """What the host does once it has queued the first update of a step on the device."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._num_calls = 0

    def run(self, beside: Callable[[], None] | None) -> None:
        """Do the given work, and on a GPU collect garbage."""
        if beside is not None:
            beside()
        if self._is_cuda:
            self.collect_garbage()

    def collect_garbage(self) -> None:
        """Collect young objects, at times all; objects alive at the third update are exempt from then on.

        Nothing is collected unless `run_lockstep` has exempted the objects of libraries, which take a second.
        """
        if not gc.get_freeze_count():
            return
        self._num_calls += 1
        gc.collect(2 if self._num_calls == FREEZE_CALL or self._num_calls % FULL_INTERVAL == 0 else 1)
        if self._num_calls == FREEZE_CALL:
            gc.freeze()
