"""Shutdown of an event loop that ran user code: remaining tasks are cancelled; what still runs is reported and left.

A coroutine may suppress its cancellation and a thread cannot be ended at all. Neither prevents a run from returning.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tunesmith.engine.event_loop.thread_calls import ThreadPool
from tunesmith.user_lines import find_running_line, find_waiting_line

GRACE_S = 2.0
"""Seconds that tasks and threads have to end by themselves."""
POLL_S = 0.02

logger = logging.getLogger(__name__)

_IDLE_CODE = concurrent.futures.thread._worker.__code__
"""Code object that an idle thread of a pool executes."""


def close_loop(
    loop: asyncio.AbstractEventLoop, threads: ThreadPool, threads_before: Collection[threading.Thread]
) -> None:
    """Cancel remaining tasks, give tasks and threads `GRACE_S` to end, report those that do not, and close the loop."""
    deadline = time.monotonic() + GRACE_S
    try:
        left = [f"{task.get_name()}, waiting{_at(find_waiting_line(task.get_coro()))}" for task in _cancel_tasks(loop)]
        loop.run_until_complete(asyncio.wait([loop.create_task(loop.shutdown_asyncgens())], timeout=GRACE_S))
        threads.shutdown(wait=False, cancel_futures=True)
        while _find_threads(threads.list_running(), threads_before) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        running = threads.list_running()
        left += [describe_thread(each, running.get(each)) for each in _find_threads(running, threads_before)]
        if left:
            logger.warning("user code still runs, and is left running:\n  %s", "\n  ".join(left))
    finally:
        threads.shutdown(wait=False)
        loop.close()


def find_busy_threads() -> list[threading.Thread]:
    """Threads that the interpreter would join at exit; idle threads of a pool end by themselves."""
    frames = sys._current_frames()
    return [
        thread
        for thread in threading.enumerate()
        if not thread.daemon
        and thread is not threading.current_thread()
        and thread is not threading.main_thread()
        and (frame := frames.get(thread.ident or 0)) is not None
        and frame.f_code is not _IDLE_CODE
    ]


def describe_thread(thread: threading.Thread, function: Callable[..., Any] | None = None) -> str:
    """Name of the thread, the function it was called with, and its current line."""
    frame = sys._current_frames().get(thread.ident or 0)
    line = None if frame is None else find_running_line(frame)
    called = "" if function is None else f" in {getattr(function, '__qualname__', type(function).__name__)}"
    return f"thread {thread.name}{called}{_at(line)}"


def _find_threads(
    running: Mapping[threading.Thread, Callable[..., Any]], before: Collection[threading.Thread]
) -> list[threading.Thread]:
    return [*running, *(thread for thread in find_busy_threads() if thread not in before)]


def _cancel_tasks(loop: asyncio.AbstractEventLoop) -> list[asyncio.Task[Any]]:
    """Cancel all tasks; return those that do not end."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if not tasks:
        return []
    loop.run_until_complete(asyncio.wait(tasks, timeout=GRACE_S))
    for task in tasks:
        if task.done() and not task.cancelled() and task.exception() is not None:
            logger.debug("a task of user code ended with an error", exc_info=task.exception())
    left = [task for task in tasks if not task.done()]
    for task in left:
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # `close_loop` reports it
    return left


def _at(line: str | None) -> str:
    return "" if line is None else f" at {line}"
