"""When the engine steps.

Lockstep: `EngineLoop` steps its engines exactly when every coroutine waits. asyncio asks its selector to block only
then, and this loop's selector makes a step instead. Which requests share a batch is then a function of the program,
never of the clock. Short calls handed to threads are waited for, and so are short sleeps; what sleeps long or talks to
other processes keeps its own time. On any other event loop a task steps between turns of the loop. Free-running: a
thread steps whenever there is work, for a loop that must stay responsive.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar, TypeVarTuple

from tunesmith.config import RolloutSection
from tunesmith.engine.event_loop.interrupts import Interrupts, MainTask, run_main
from tunesmith.engine.event_loop.shutdown import close_loop
from tunesmith.engine.event_loop.thread_calls import ThreadCalls, Threads

SHORT_SLEEP_S = 0.01
"""A timer that is due within this time is waited for: agents sleep a millisecond to let others run."""
SLEEP_BUDGET_S = 0.25
"""Between two steps at most so much is slept, so that an agent that polls for its model's answer gets it."""
MIN_NEW_OBJECTS = 10_000
"""Before the youngest objects are searched for garbage."""
NUM_TURNS_BETWEEN_STEPS = 3
"""Turns of a foreign loop for a result to be delivered, its coroutine to wake, and its next request to arrive."""

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class Steppable(Protocol):
    """What a clock drives."""

    @property
    def has_work(self) -> bool: ...

    def step(self) -> None:
        """Compute one batch and deliver its results to the event loop; never raises for a request's sake."""
        ...


class Clock(Protocol):
    """Drives one engine."""

    def notify(self) -> None:
        """There may be work now."""
        ...


class _SteppingSelector(selectors.DefaultSelector):
    """A selector that makes the engines step where it would block with nothing to report."""

    def __init__(self, thread_calls: ThreadCalls) -> None:
        super().__init__()
        self.engines: list[Steppable] = []
        self._thread_calls = thread_calls
        self._slept_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        events = super().select(0)
        working = [engine for engine in self.engines if engine.has_work]
        if events or not working:
            return events or super().select(timeout)
        patience_s = self._thread_calls.compute_patience_s()
        if patience_s > 0:
            with self._thread_calls.waiting():
                return super().select(patience_s if timeout is None else min(timeout, patience_s))
        if timeout is not None and timeout <= SHORT_SLEEP_S and self._slept_s < SLEEP_BUDGET_S:
            self._slept_s += timeout
            return super().select(timeout)
        self._slept_s = 0.0
        for engine in working:
            engine.step()
        return super().select(0)


class EngineLoop(asyncio.SelectorEventLoop):
    """An event loop whose engines step when every coroutine waits; nobody but its runner can stop it."""

    def __init__(self, settings: RolloutSection) -> None:
        self.threads = Threads(settings.max_concurrency)
        self._thread_calls = ThreadCalls(settings.thread_patience_s)
        self._stepping = _SteppingSelector(self._thread_calls)
        self._awaited: asyncio.Future[Any] | None = None
        super().__init__(self._stepping)

    def add_engine(self, engine: Steppable) -> None:
        """Let this loop step the engine; engines step in the order they were added."""
        if engine not in self._stepping.engines:
            self._stepping.engines.append(engine)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Arguments], T], *args: *Arguments
    ) -> asyncio.Future[T]:
        if executor is None and self._default_executor is None:  # type: ignore[attr-defined]
            executor = self.threads
        future = super().run_in_executor(executor, func, *args)
        self._thread_calls.begin(future, func, args)
        return future

    def run_until_complete(self, future: Any) -> Any:
        self._awaited = asyncio.ensure_future(future, loop=self)
        return super().run_until_complete(self._awaited)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Report what nobody else can; what ends a process is raised through the loop as well."""
        if not isinstance(context.get("exception"), KeyboardInterrupt | SystemExit):
            super().call_exception_handler(context)

    def stop(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            raise RuntimeError("a workflow cannot stop the event loop, which all rollouts share")
        super().stop()


def run_lockstep(coroutine: Coroutine[Any, Any, T], settings: RolloutSection = RolloutSection()) -> T:
    """`asyncio.run` on an `EngineLoop`, for code of which parts are the user's.

    What of it still runs at the end is cancelled, waited for a moment, named, and left alone. The first Ctrl-C or
    SIGTERM cancels the coroutine, the second interrupts whatever runs. Garbage collections come less often, for a load
    of requests makes many objects that live on, and they leave out what exists already: to walk over all objects of
    the libraries takes a second.
    """
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(thresholds[0] and max(thresholds[0], MIN_NEW_OBJECTS), *thresholds[1:])
    threads_before = frozenset(threading.enumerate())
    loop = EngineLoop(settings)
    try:
        asyncio.set_event_loop(loop)
        main = MainTask(coroutine, loop=loop, name="tunesmith")
        with Interrupts(loop, main) as interrupts:
            try:
                return run_main(loop, main, interrupts)
            finally:
                close_loop(loop, loop.threads, threads_before)
    finally:
        asyncio.set_event_loop(None)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


class LoopClock:
    """Lockstep on an `EngineLoop`, which looks for work by itself."""

    def __init__(self, engine: Steppable, loop: EngineLoop) -> None:
        loop.add_engine(engine)

    def notify(self) -> None:
        """Nothing to do."""


class TaskClock:
    """Steps from a task of an ordinary event loop."""

    def __init__(self, engine: Steppable, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._task: asyncio.Task[None] | None = None

    def notify(self) -> None:
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(self._run())

    async def _run(self) -> None:
        while self._engine.has_work:
            for _ in range(NUM_TURNS_BETWEEN_STEPS):
                await asyncio.sleep(0)
            self._engine.step()


class ThreadClock:
    """Free-running: a thread lives as long as there is work."""

    def __init__(self, engine: Steppable) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._is_running = False

    def notify(self) -> None:
        with self._lock:
            if self._is_running:
                return
            self._is_running = True
        threading.Thread(target=self._run, name="tunesmith-engine", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._engine.has_work:
                    self._is_running = False
                    return
            self._engine.step()


def build_clock(engine: Steppable, *, is_lockstep: bool) -> Clock:
    """The clock for the running event loop."""
    if not is_lockstep:
        return ThreadClock(engine)
    loop = asyncio.get_running_loop()
    return LoopClock(engine, loop) if isinstance(loop, EngineLoop) else TaskClock(engine, loop)
