"""Runs user code: a coroutine, isolated from other rollouts on the same thread, or a synchronous workflow.

Torch modes (gradients, inference mode, autocast, default dtype) set by a coroutine apply to it only; they are swapped
in and out around each step, that is the code between two awaits. Each step is timed: a long one has blocked the event
loop and all other rollouts.

A synchronous workflow runs in a thread of its own, and its model calls on the event loop. The engines wait for the
thread while it computes, as for other short calls in threads, and not while it waits for the model. A thread cannot be
stopped: after a timeout it is abandoned, and its next model call is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from concurrent.futures import Executor, Future
from typing import Any, Generic, TypeVar

from tunesmith.model.torch_modes import UserModes
from tunesmith.rollout.watchdog import BlockedTime, EventLoopWatchdog
from tunesmith.user_lines import find_running_line, find_waiting_line

T = TypeVar("T")


class ThreadCall(Generic[T]):
    """An awaitable that calls a function in a new thread; await it once."""

    def __init__(self, function: Callable[..., T], arguments: Mapping[str, Any]) -> None:
        self._function = function
        self._arguments = arguments
        self._loop = asyncio.get_running_loop()
        self._result: asyncio.Future[T] = self._loop.create_future()
        self._thread: threading.Thread | None = None
        self._computing: Future[None] | None = None
        """Not done while the thread computes."""
        self._num_model_calls = 0

    def __await__(self) -> Generator[Any, Any, T]:
        context = contextvars.copy_context()
        context.run(_current.set, self)
        target = context.run
        self._thread = threading.Thread(target=target, args=(self._run,), name="tunesmith-workflow", daemon=True)
        self._start_computing()
        self._thread.start()
        try:
            return (yield from self._result.__await__())
        finally:
            self._stop_computing()

    def find_line(self) -> str | None:
        """The line of user code that the thread executes."""
        ident = None if self._thread is None else self._thread.ident
        frame = None if ident is None else sys._current_frames().get(ident)
        return None if frame is None else find_running_line(frame)

    def begin_model_call(self) -> None:
        self._num_model_calls += 1
        self._stop_computing()

    def end_model_call(self) -> None:
        self._num_model_calls -= 1
        if self._num_model_calls == 0 and not self._result.done():
            self._start_computing()

    def _run(self) -> None:
        error: BaseException | None = None
        result: Any = None
        try:
            result = self._function(**self._arguments)
        except StopIteration as stop:  # a future cannot hold it
            error = RuntimeError(f"the workflow raised {stop!r}")
        except BaseException as raised:  # noqa: BLE001 - raised where the call is awaited
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._finish, result, error)

    def _finish(self, result: Any, error: BaseException | None) -> None:
        if self._result.done():  # cancelled
            return
        if error is None:
            self._result.set_result(result)
        else:
            self._result.set_exception(error)

    def _start_computing(self) -> None:
        self._computing = Future()
        self._loop.run_in_executor(_Given(self._computing), self._function)

    def _stop_computing(self) -> None:
        if self._computing is not None and not self._computing.done():
            self._computing.set_result(None)


class _Given(Executor):
    """Submits nothing and returns a given future, so that the event loop knows of a thread that it has not started."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._future


def call_on_loop(loop: asyncio.AbstractEventLoop, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on the event loop and wait for it; call it from another thread only."""
    with contextlib.suppress(RuntimeError):
        if asyncio.get_running_loop() is loop:
            message = (
                "a synchronous model call on the event loop would block it: use the async client, a workflow that is "
                "a plain function, or asyncio.to_thread"
            )
            raise BlockingCallError(message)
    thread_call = _current.get()

    async def run() -> T:
        if thread_call is None:
            return await make()
        thread_call.begin_model_call()
        try:
            return await make()
        finally:
            thread_call.end_model_call()

    return asyncio.run_coroutine_threadsafe(run(), loop).result()


class BlockingCallError(BaseException):
    """A synchronous model call in a coroutine; no `Exception`, which SDKs replace by a connection error and retry."""


_current: contextvars.ContextVar[ThreadCall[Any] | None] = contextvars.ContextVar("thread_call", default=None)


Output = TypeVar("Output")


class UserCoroutine(Generic[Output]):
    """An awaitable around a user coroutine; await it once."""

    def __init__(self, awaitable: Awaitable[Output], watchdog: EventLoopWatchdog, run: BlockedTime) -> None:
        """Blocking steps are recorded in the watchdog and in `run`."""
        self._awaitable = awaitable
        self._watchdog = watchdog
        self._run = run

    def find_line(self) -> str | None:
        """The line of user code at which the coroutine is suspended, or that its thread executes."""
        awaitable = self._awaitable
        return awaitable.find_line() if isinstance(awaitable, ThreadCall) else find_waiting_line(awaitable)

    def __await__(self) -> Generator[Any, Any, Output]:
        steps = self._awaitable.__await__()
        modes = UserModes()
        value: Any = None
        error: BaseException | None = None
        while True:
            started, has_ended = time.monotonic(), True
            modes.enter()
            try:
                yielded = steps.send(value) if error is None else steps.throw(error)
                has_ended = False
            except StopIteration as end:
                return end.value
            finally:
                modes.leave(has_ended=has_ended)
                self._watchdog.record_step(self._run, time.monotonic() - started)
            value, error = None, None
            try:
                value = yield yielded
            except BaseException as thrown:  # noqa: BLE001 - exceptions thrown in are forwarded to the user's coroutine
                error = thrown
