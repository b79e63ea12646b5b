"""Runs a call that starts an event loop while the caller's thread already runs one, as in a notebook."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from tunesmith.engine.event_loop.signal_handlers import interrupt_thread

Result = TypeVar("Result")

WAIT_S = 1.0
"""Longest wait for a thread at a time; on Windows Ctrl-C is noticed only between two waits."""
MAX_INTERRUPTS = 2
"""Interrupts before one leaves running a thread whose code was interrupted and has not ended."""


def is_event_loop_running() -> bool:
    """Whether an event loop runs in the calling thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def run_outside_of_loops(work: Callable[[], Result]) -> Result:
    """Run a function that starts an event loop; in a new thread if the calling thread already runs one.

    Ctrl-C while the new thread runs interrupts `work` there and raises KeyboardInterrupt once it has ended. As in a
    command, the first lets a run finish its step, the next cancels it, the one after interrupts whatever runs; one more
    raises at once and leaves the thread running.
    """
    if not is_event_loop_running():
        return work()
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="tunesmith", daemon=True)
    with interrupts_raised():
        thread.start()
        is_interrupted = wait_for_thread(thread, outcome)
    error = outcome.exception()
    if is_interrupted and not isinstance(error, KeyboardInterrupt):
        raise KeyboardInterrupt from error
    return outcome.result()


def wait_for_thread(thread: threading.Thread, outcome: Future[Any]) -> bool:
    """Wait for the end of the thread's work; Ctrl-C is passed on to it. Returns whether there was one.

    Waits for the outcome, because a `Thread.join` that Ctrl-C interrupts takes the thread for ended.
    """
    num_interrupts = num_passed_on = 0
    is_code_interrupted = False
    while True:
        try:
            while num_passed_on < num_interrupts:  # here, where the next Ctrl-C is noticed too
                num_passed_on += 1
                is_code_interrupted = interrupt_thread(thread) or is_code_interrupted
            while not wait([outcome], WAIT_S).done:
                pass
        except KeyboardInterrupt:
            num_interrupts += 1
            if num_interrupts > MAX_INTERRUPTS and is_code_interrupted:
                raise
        else:
            thread.join()
            return num_interrupts > 0


@contextlib.contextmanager
def interrupts_raised() -> Iterator[None]:
    """Within: Ctrl-C raises KeyboardInterrupt, although `asyncio.run` installed a handler that cancels its main task,
    which could not happen before the caller awaits again."""
    handler = signal.getsignal(signal.SIGINT)
    is_of_runner = isinstance(getattr(getattr(handler, "func", None), "__self__", None), asyncio.Runner)
    if not is_of_runner or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
