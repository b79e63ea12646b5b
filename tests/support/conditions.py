"""Waiting for a condition instead of for a time, letting time pass without waiting, and skipping for want of a program.

A test that sleeps for as long as something usually takes fails on a machine that is busy. It waits for the thing itself
here; the limit only ends a test that hangs.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

import pytest

HANG_S = 120.0
"""Far longer than anything that tests wait for takes on a busy machine."""

REQUIRED = "TUNESMITH_REQUIRED"
"""Names what must work on this machine: its tests fail where they would be skipped."""

_monotonic, _perf_counter = time.monotonic, time.perf_counter


async def until(is_true: Callable[[], object], interval_s: float = 0.001) -> None:
    """Return once the condition is true; other tasks of the event loop run meanwhile."""
    deadline = _monotonic() + HANG_S
    while not is_true():
        assert _monotonic() < deadline, "the condition stays false"
        await asyncio.sleep(interval_s)


def wait_until(is_true: Callable[[], object], interval_s: float = 0.01) -> None:
    """Block the thread until the condition is true."""
    deadline = _monotonic() + HANG_S
    while not is_true():
        assert _monotonic() < deadline, "the condition stays false"
        time.sleep(interval_s)


class SkippableTime:
    """`time.monotonic`, thus the time of event loops, and `time.perf_counter`, which a test moves forward."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._skipped_s = 0.0
        patch.setattr(time, "monotonic", lambda: _monotonic() + self._skipped_s)
        patch.setattr(time, "perf_counter", lambda: _perf_counter() + self._skipped_s)

    def skip(self, seconds: float) -> None:
        """Let time pass in the code that runs, which counts as code that took so long."""
        self._skipped_s += seconds

    def skip_soon(self, seconds: float) -> None:
        """Let time pass between two callbacks of the running event loop, as if every coroutine had waited."""
        asyncio.get_running_loop().call_soon(self.skip, seconds)


def skip_without(name: str, reason: str) -> None:
    """Skip the test, or fail it if this machine was said to have what it needs."""
    if name in os.environ.get(REQUIRED, "").split():
        pytest.fail(f"{REQUIRED} names {name}: {reason}")
    pytest.skip(reason)
