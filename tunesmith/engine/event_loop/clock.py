"""Clocks: when the engine steps.

Lockstep: `EngineLoop` steps its engines exactly when every coroutine waits. asyncio lets its selector block only then,
and this loop's selector runs a step instead. Which requests share a batch is thus a function of the program and never
of time. The loop waits for short calls in threads and short sleeps; long sleeps and calls to other processes complete
in their own time. On any other event loop a task steps between iterations of the loop.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar, TypeVarTuple

from tunesmith.config import RolloutSection
from tunesmith.engine.event_loop.shutdown import close_loop
from tunesmith.engine.event_loop.signal_handlers import MainTask, SignalHandlers, run_main
from tunesmith.engine.event_loop.thread_calls import ThreadCallTracker, ThreadPool
from tunesmith.garbage import frozen_objects

SHORT_SLEEP_S = 0.01
"""The loop waits for timers due within this time: agents sleep for a millisecond to let others run."""
SLEEP_BUDGET_S = 0.25
"""Longest total sleep between two steps; without it, an agent that polls for its own completion would wait forever."""
MIN_NEW_OBJECTS = 500_000
"""Generation-0 threshold of the garbage collector while the loop runs. A collection looks at each token of recorded
turns: with 100,000 it takes a tenth of the time of model calls. On a GPU the trainer collects in each update anyway."""
NUM_ITERATIONS_BETWEEN_STEPS = 3
"""On other event loops: a result is delivered, its coroutine resumes, and its next request arrives."""

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class Steppable(Protocol):
    """The interface of an engine that a clock uses."""

    @property
    def has_work(self) -> bool: ...

    def step(self) -> None:
        """Run one step and deliver its output to the event loop; errors of requests are delivered, not raised."""
        ...


class Clock(Protocol):
    """Drives one engine."""

    def notify(self) -> None:
        """The engine may have work."""
        ...

    @property
    def waited_s(self) -> float | None:
        """Seconds so far in which the event loop waited for threads, servers or timers; None if not measured."""
        ...


class _SteppingSelector(selectors.DefaultSelector):
    """A selector that steps the engines where it would block."""

    def __init__(self, thread_calls: ThreadCallTracker) -> None:
        super().__init__()
        self.engines: list[Steppable] = []
        self.is_stepping = True
        self.waited_s = 0.0
        self._thread_calls = thread_calls
        self._slept_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # asyncio passes 0 while callbacks are ready: some coroutine can still run, and may send a request of this step
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        # what has arrived comes before a step: it may wake a coroutine whose request then is in the same batch
        events = super().select(0)
        working = [engine for engine in self.engines if engine.has_work] if self.is_stepping else []
        if events or not working:
            return events or self._wait(timeout)
        wait_s = self._thread_calls.compute_wait_s()
        if wait_s > 0:
            with self._thread_calls.waiting():
                return self._wait(wait_s if timeout is None else min(timeout, wait_s))
        if timeout is not None and timeout <= SHORT_SLEEP_S and self._slept_s < SLEEP_BUDGET_S:
            self._slept_s += timeout
            return self._wait(timeout)
        self._slept_s = 0.0
        for engine in working:
            if self.is_stepping:  # the first may be `LoopWindows`: its step may end the window
                engine.step()
        return super().select(0)

    def _wait(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        started_at = time.perf_counter()
        try:
            return super().select(timeout)
        finally:
            self.waited_s += time.perf_counter() - started_at


class EngineLoop(asyncio.SelectorEventLoop):
    """An event loop whose engines step when every coroutine waits; only `run_until_complete` can stop it.

    It is the `Clock` of each engine that is added to it.
    """

    def __init__(self, settings: RolloutSection) -> None:
        self.threads = ThreadPool(settings.max_concurrency)
        self._thread_calls = ThreadCallTracker(settings.thread_patience_s)
        self.selector = _SteppingSelector(self._thread_calls)
        self._main_future: asyncio.Future[Any] | None = None
        super().__init__(self.selector)

    @property
    def waited_s(self) -> float:
        """Seconds in which every coroutine waited and no engine was stepped."""
        return self.selector.waited_s

    def add_engine(self, engine: Steppable) -> None:
        """Let this loop step the engine; engines step in the order they were added."""
        if engine not in self.selector.engines:
            self.selector.engines.append(engine)

    def notify(self) -> None:
        """Nothing to do: the loop asks its engines for work whenever every coroutine waits."""

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Arguments], T], *args: *Arguments
    ) -> asyncio.Future[T]:
        if executor is None and self._default_executor is None:  # type: ignore[attr-defined]
            executor = self.threads
        future = super().run_in_executor(executor, func, *args)
        self._thread_calls.track(future, func, args)
        return future

    def run_until_complete(self, future: Any) -> Any:
        self._main_future = asyncio.ensure_future(future, loop=self)
        return super().run_until_complete(self._main_future)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Report errors of tasks never awaited, except KeyboardInterrupt and SystemExit: the loop raises these."""
        if not isinstance(context.get("exception"), KeyboardInterrupt | SystemExit):
            super().call_exception_handler(context)

    def stop(self) -> None:
        if self._main_future is not None and not self._main_future.done():
            raise RuntimeError("a workflow cannot stop the event loop, which all rollouts share")
        super().stop()


def run_lockstep(coroutine: Coroutine[Any, Any, T], settings: RolloutSection = RolloutSection()) -> T:
    """`asyncio.run` on an `EngineLoop`, for a coroutine that calls user code.

    Tasks and threads that still run at the end are cancelled, awaited for `shutdown.GRACE_S`, reported, and left
    running. The first Ctrl-C or SIGTERM cancels the coroutine, the second interrupts whatever runs. Garbage is
    collected less often, because requests create many long-lived objects, and existing objects are frozen, because a
    full collection over those of the libraries takes a second; a program that has frozen its objects keeps them so.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(thresholds[0] and max(thresholds[0], MIN_NEW_OBJECTS), *thresholds[1:])
    threads_before = frozenset(threading.enumerate())
    loop = EngineLoop(settings)
    try:
        asyncio.set_event_loop(loop)
        main = MainTask(coroutine, loop=loop, name="tunesmith")
        with frozen_objects(), SignalHandlers(loop, main) as handlers:
            try:
                return run_main(loop, main, handlers)
            finally:
                close_loop(loop, loop.threads, threads_before)
    finally:
        asyncio.set_event_loop(None)
        gc.set_threshold(*thresholds)


class TaskClock:
    """Steps from a task of an ordinary event loop."""

    waited_s = None

    def __init__(self, engine: Steppable, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._task: asyncio.Task[None] | None = None

    def notify(self) -> None:
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(self._run())

    async def _run(self) -> None:
        while self._engine.has_work:
            for _ in range(NUM_ITERATIONS_BETWEEN_STEPS):
                await asyncio.sleep(0)
            self._engine.step()


def build_clock(engine: Steppable) -> Clock:
    """The clock for the running event loop."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, EngineLoop):
        return TaskClock(engine, loop)
    loop.add_engine(engine)
    return loop


WINDOW_STEPS = 8


class LoopWindows:
    """Windows of engine steps, so that several processes stop sampling at a step and not at a time.

    Within a window the event loop steps its engines as always; after `WINDOW_STEPS` steps it stops until the next
    `begin`. A window also ends when every coroutine waits and no engine has work; an engine that gets work later is
    stepped. Without windows the engines step from `begin` to `stop`.

    This is itself the first of the loop's engines, so it counts each step before the others make it.
    """

    def __init__(self, on_end: Callable[[bool], None], *, engines: Sequence[Steppable], has_windows: bool) -> None:
        """On the running event loop, an `EngineLoop`. `on_end` is called when a window ends, with whether no engine has
        work; never without windows."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, EngineLoop), "runs use run_lockstep"
        self._loop = loop
        self._engines = engines
        self._on_end = on_end
        self.has_windows = has_windows
        self._is_counting = False
        self._is_idle = False
        self._num_steps = 0
        loop.selector.engines.insert(0, self)

    @property
    def has_work(self) -> bool:
        return self._is_counting and (not self._is_idle or self._are_working)

    @property
    def _are_working(self) -> bool:
        return any(engine.has_work for engine in self._engines)

    def begin(self) -> None:
        """Let the engines step, from the start of a window."""
        self._is_counting, self._is_idle, self._num_steps = self.has_windows, False, 0
        self._loop.selector.is_stepping = True

    def stop(self) -> None:
        """Let no engine step; their requests wait, and everything else on the event loop continues."""
        self._is_counting = self._loop.selector.is_stepping = False

    def release(self) -> None:
        """Let the engines step without windows."""
        self._is_counting, self._loop.selector.is_stepping = False, True

    def check_again(self) -> None:
        """Call `on_end` once more if the engines still have no work when every coroutine waits."""
        self._is_idle = False

    def step(self) -> None:
        """Count a step that the engines are about to make; called when every coroutine waits."""
        if not self._are_working:
            self._is_idle = True
            self._loop.call_soon(self._on_end, True)
        elif self._num_steps == WINDOW_STEPS:
            self._loop.selector.is_stepping = False
            self._loop.call_soon(self._on_end, False)  # not within this step: it ends here in any case
        else:
            self._num_steps += 1
