"""Work of the host while the device computes gradients.

The host can queue about a thousand kernels, so it is never far ahead of the device: 0.1 s on an H200. Work is therefore
done in pieces, one after each row that was queued. Python's garbage collector is one of them: it would stop the host
for 10 to 500 ms at a time, at moments that differ between ranks, which wait for each other.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

FREEZE_CALL = 3
"""Update after which everything is compiled: what is alive then lives as long as the run."""
FULL_INTERVAL = 10
"""Updates between collections of all generations; the collector would start one by itself after eleven."""


class HostWork:
    """What the host does while the device works on the first update of a step."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._num_calls = 0
        self._pieces: list[Callable[[], None]] = []

    def begin(self, pieces: Sequence[Callable[[], None]]) -> None:
        """Plan these pieces of work and, on a GPU, a collection of garbage."""
        self._pieces = [*pieces, *([self.collect_garbage] if self._is_cuda else [])]

    def advance(self) -> None:
        """Do the next piece, if one is left: a row was queued."""
        if self._pieces:
            self._pieces.pop(0)()

    def finish(self) -> None:
        """Do what is left: all rows were queued."""
        while self._pieces:
            self.advance()

    def collect_garbage(self) -> None:
        """Collect young objects, at times all; objects alive at the third update are exempt from then on.

        Nothing is collected unless `run_lockstep` has exempted the objects of libraries, which take a second.
        """
        if self._num_calls == 0 and not gc.get_freeze_count():  # counting a million objects takes 0.1 s
            return
        self._num_calls += 1
        gc.collect(2 if self._num_calls == FREEZE_CALL or self._num_calls % FULL_INTERVAL == 0 else 1)
        if self._num_calls == FREEZE_CALL:
            gc.freeze()
