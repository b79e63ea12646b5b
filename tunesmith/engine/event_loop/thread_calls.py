"""Calls that user code hands to threads: the threads, and how long the engines wait for such a call.

To wait makes what is sampled independent of when a thread ends, and costs the time for which the engines stand still.
So short calls are waited for and long ones are not. Which is which is known by function: once no call ends for
several times the patience, or the engines waited longer than the patience for a function's calls on average, the
function is not waited for any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextvars import Context
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

LONGEST_WAIT = 5.0
"""Times the patience: so long nothing may end in any thread before the calls in them are called slow."""
MIN_ENDED_CALLS = 10
"""Calls of a function before their mean says anything."""

T = TypeVar("T")
Parameters = ParamSpec("Parameters")


class Threads(Executor):
    """At most `max_threads` threads, made as they are needed; they do not keep the process from ending."""

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
                raise RuntimeError("the run has ended: its threads take no more calls")
            self._work.append((future, functools.partial(fn, *args, **kwargs)))
            if self._num_idle >= len(self._work) or len(self._threads) == self._max_threads:
                self._changed.notify()
                return future
            thread = threading.Thread(target=self._serve, name=f"tunesmith-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
        thread.start()
        return future

    def list_running(self) -> dict[threading.Thread, Callable[..., Any]]:
        """The threads that are in a call, and the function that was called."""
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
        me = threading.current_thread()
        while True:
            with self._changed:
                self._num_idle += 1
                while not self._work and not self._is_closed:
                    self._changed.wait()
                self._num_idle -= 1
                if not self._work:
                    return
                future, call = self._work.popleft()
                self._running[me] = call
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            with self._changed:
                del self._running[me]
            del future, call


def find_function(call: Callable[..., Any], arguments: Sequence[Any] = ()) -> Callable[..., Any]:
    """The function of the user's in what `run_in_executor` is given; `asyncio.to_thread` hands over `Context.run`."""
    while True:
        partial: Any = call if isinstance(call, functools.partial) else None
        if partial is not None:
            call, arguments = partial.func, (*partial.args, *arguments)
        elif isinstance(getattr(call, "__self__", None), Context) and arguments:
            call, arguments = arguments[0], arguments[1:]
        else:
            return call


def _identify(function: Callable[..., Any]) -> Hashable:
    """Equal for all bound methods and closures of one definition."""
    function = getattr(function, "__func__", function)
    key: Any = getattr(function, "__code__", function)
    return (key,) if isinstance(key, Hashable) else (type(key),)


@dataclass(slots=True)
class _Account:
    """What the engines waited for one function's calls."""

    waited_s: float = 0.0
    num_ended: int = 0


class ThreadCalls:
    """The calls in threads of one event loop."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._calls: dict[asyncio.Future[Any], Hashable] = {}
        self._accounts: dict[Hashable, _Account] = {}
        self._slow: set[Hashable] = set()
        self._last_change = 0.0
        """When a call last began or ended."""

    def begin(self, future: asyncio.Future[Any], call: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """A call was handed to a thread; the future ends with it."""
        self._calls[future] = _identify(find_function(call, arguments))
        self._last_change = time.monotonic()
        future.add_done_callback(self._end)

    def compute_patience_s(self) -> float:
        """Seconds for which the engines should wait for the calls that are under way, 0 where none is worth it."""
        if not self._calls:
            return 0.0
        waited = self._find_waited()
        if not waited:
            return 0.0
        left_s = self._last_change + LONGEST_WAIT * self._patience_s - time.monotonic()
        if left_s <= 0:
            self._slow |= waited
        return left_s

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The engines wait."""
        waited, started = self._find_waited(), time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - started
            for function in waited:
                self._accounts.setdefault(function, _Account()).waited_s += seconds

    def _find_waited(self) -> set[Hashable]:
        return set(self._calls.values()) - self._slow

    def _end(self, future: asyncio.Future[Any]) -> None:
        function = self._calls.pop(future)
        if function in self._slow:
            return
        self._last_change = time.monotonic()
        account = self._accounts.setdefault(function, _Account())
        account.num_ended += 1
        if account.num_ended >= MIN_ENDED_CALLS and account.waited_s > self._patience_s * account.num_ended:
            self._slow.add(function)
