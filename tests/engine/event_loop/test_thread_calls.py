"""Which calls in threads count as calls of one function, and that nothing of them is kept."""

from __future__ import annotations

import asyncio
import functools
import gc
import io
import time
import weakref

from tunesmith.config import RolloutSection
from tunesmith.engine.event_loop.clock import EngineLoop
from tunesmith.engine.event_loop.thread_calls import MIN_ENDED_CALLS, ThreadCallTracker


class Buffer(io.BytesIO):
    """Can be referenced weakly."""


class Lookup:
    def __call__(self) -> None: ...

    def run(self) -> None: ...


def test_objects_whose_methods_ran_in_threads_are_not_kept():
    """The methods are C functions, Python functions and instances that can be called."""
    kept: list[weakref.ref[object]] = []

    async def run() -> None:
        for _ in range(3):
            buffer, lookup = Buffer(), Lookup()
            kept.extend(map(weakref.ref, (buffer, lookup)))
            for call in (buffer.read, lookup, lookup.run, functools.partial(buffer.seek, 0)):
                await asyncio.to_thread(call)

    loop = EngineLoop(RolloutSection())
    loop.run_until_complete(run())
    gc.collect()
    assert [each() for each in kept] == [None] * 6
    loop.close()


def test_slow_calls_of_new_objects_count_as_one_function():
    """The engines stop waiting for them as they do for a function."""
    loop = asyncio.new_event_loop()
    for build in (lambda: Buffer().read, Lookup, lambda: Lookup().run, lambda: lambda: None):
        tracker = ThreadCallTracker(patience_s=0.001)
        for _ in range(MIN_ENDED_CALLS):
            future = loop.create_future()
            tracker.track(future, build(), ())
            with tracker.waiting():
                time.sleep(0.002)
            future.set_result(None)
            loop.run_until_complete(asyncio.sleep(0))
        tracker.track(loop.create_future(), build(), ())
        assert tracker.compute_wait_s() == 0
    loop.close()


def test_functions_of_one_name_are_different_functions():
    loop, tracker = asyncio.new_event_loop(), ThreadCallTracker(patience_s=0.0)
    slow, other = loop.create_future(), loop.create_future()
    tracker.track(slow, time.sleep, ())
    assert tracker.compute_wait_s() <= 0  # no patience: the function counts as slow
    for call in (io.BytesIO().read, io.StringIO().read, len):
        tracker.track(other, call, ())
        assert tracker._find_awaited()
    loop.close()
