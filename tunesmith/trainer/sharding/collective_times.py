"""Time that a rank waits for other ranks and communicates within updates; on a GPU without synchronizing.

The host may be ahead of the GPU: an interval that has not ended there is reported with those of the next step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class CollectiveTimes:
    """Intervals on the device's clock, read when asked for."""

    def __init__(self, device: torch.device | str) -> None:
        self._is_cuda = torch.device(device).type == "cuda"
        self._intervals: list[tuple[str, Any, Any]] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The work within is a collective without data: its time is that of the slowest rank."""
        with self._measuring("perf/train_wait_s"):
            yield

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """The work within moves gradients or weights between ranks, and packs them."""
        with self._measuring("perf/communication_s"):
            yield

    def take(self) -> dict[str, float]:
        """Sums of the intervals that have ended since the last call, in seconds."""
        times = {"perf/train_wait_s": 0.0, "perf/communication_s": 0.0}
        pending = []
        for name, start, end in self._intervals:
            if not self._is_cuda:
                times[name] += end - start
            elif end.query():
                times[name] += start.elapsed_time(end) / 1000
            else:
                pending.append((name, start, end))
        self._intervals = pending
        return times

    @contextmanager
    def _measuring(self, name: str) -> Iterator[None]:
        start = self._mark()
        yield
        self._intervals.append((name, start, self._mark()))

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
