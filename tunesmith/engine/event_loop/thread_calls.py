"""Calls that user code makes in threads: the thread pool, and how long the engines wait for such calls.

Waiting makes sampling independent of when a thread ends, but idles the engines. So they wait for short calls only.
Calls are classified by function: once no call ends for `MAX_WAIT_FACTOR` times the patience
(`rollout.thread_patience_s`), or the mean wait for a function's calls exceeds the patience, the engines no longer wait
for that function.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextvars import Context
from typing import Any, ParamSpec, TypeVar

MAX_WAIT_FACTOR = 5.0
"""Multiple of the patience; if no call in any thread ends for so long, the functions in threads count as slow."""
MIN_ENDED_CALLS = 10
"""Calls of a function before its mean wait is evaluated."""

T = TypeVar("T")
Parameters = ParamSpec("Parameters")


class ThreadPool(Executor):
    """At most `max_threads` daemon threads, started on demand; the process does not join them at exit."""

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._threads: list[threading.Thread] = []
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._num_idle = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._running: dict[threading.Thread, Callable[[], Any]] = {}

    def submit(self, fn: Callable[Parameters, T], /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Future[T]:
        future: Future[T] = Future()
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the run has ended: its thread pool accepts no more calls")
            self._work.append((future, functools.partial(fn, *args, **kwargs)))
            if self._num_idle >= len(self._work) or len(self._threads) == self._max_threads:
                self._changed.notify()
                return future
            thread = threading.Thread(target=self._serve, name=f"tunesmith-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
        thread.start()
        return future

    def list_running(self) -> dict[threading.Thread, Callable[..., Any]]:
        """Threads that are executing a call, and the function that was called."""
        with self._changed:
            return {thread: find_function(call) for thread, call in self._running.items()}

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._changed:
            self._is_closed = True
            if cancel_futures:
                while self._work:
                    self._work.popleft()[0].cancel()
            self._changed.notify_all()
        if wait:
            for thread in self._threads:
                thread.join()

    def _serve(self) -> None:
        current = threading.current_thread()
        while True:
            with self._changed:
                self._num_idle += 1
                while not self._work and not self._is_closed:
                    self._changed.wait()
                self._num_idle -= 1
                if not self._work:
                    return
                future, call = self._work.popleft()
                self._running[current] = call
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            with self._changed:
                del self._running[current]
            del future, call


def find_function(call: Callable[..., Any], arguments: Sequence[Any] = ()) -> Callable[..., Any]:
    """The user's function in the arguments of `run_in_executor`; `asyncio.to_thread` wraps it in `Context.run`."""
    while True:
        partial: Any = call if isinstance(call, functools.partial) else None
        if partial is not None:
            call, arguments = partial.func, (*partial.args, *arguments)
        elif isinstance(getattr(call, "__self__", None), Context) and arguments:
            call, arguments = arguments[0], arguments[1:]
        else:
            return call


def _identify(function: Callable[..., Any]) -> Hashable:
    """Equal for all calls of one definition: bound methods of any object, closures, instances of a callable class.

    Keeps no such object alive: identities are kept for the run.
    """
    function = getattr(function, "__func__", function)
    code: Hashable = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", None)
    if code is not None:
        return code
    if name is None:
        return (type(function),)
    return type(getattr(function, "__self__", None)), getattr(function, "__module__", None), name


class ThreadCallTracker:
    """Tracks the calls in threads of one event loop, and computes how long the engines wait for them."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._calls: dict[asyncio.Future[Any], Hashable] = {}
        self._waited_s: defaultdict[Hashable, float] = defaultdict(float)
        """Total wait of the engines for the calls of each function."""
        self._num_ended: Counter[Hashable] = Counter()
        self._slow: set[Hashable] = set()
        self._last_change = 0.0
        """Time at which a call last began or ended."""

    def track(self, future: asyncio.Future[Any], call: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Record a call in a thread; the future is done when the call ends."""
        self._calls[future] = _identify(find_function(call, arguments))
        self._last_change = time.monotonic()
        future.add_done_callback(self._record_end)

    def compute_wait_s(self) -> float:
        """Seconds for which the engines should wait for current calls; 0 if all are of slow functions."""
        if not self._calls:
            return 0.0
        awaited = self._find_awaited()
        if not awaited:
            return 0.0
        remaining_s = self._last_change + MAX_WAIT_FACTOR * self._patience_s - time.monotonic()
        if remaining_s <= 0:
            self._slow |= awaited
        return remaining_s

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure the time for which the engines wait."""
        awaited, started = self._find_awaited(), time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - started
            for function in awaited:
                self._waited_s[function] += seconds

    def _find_awaited(self) -> set[Hashable]:
        return set(self._calls.values()) - self._slow

    def _record_end(self, future: asyncio.Future[Any]) -> None:
        function = self._calls.pop(future)
        if function in self._slow:
            return
        self._last_change = time.monotonic()
        self._num_ended[function] += 1
        num_ended = self._num_ended[function]
        if num_ended >= MIN_ENDED_CALLS and self._waited_s[function] > self._patience_s * num_ended:
            self._slow.add(function)
