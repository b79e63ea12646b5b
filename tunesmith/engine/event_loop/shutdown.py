"""The end of an event loop on which user code ran: what still runs is cancelled, named and left alone.

A coroutine may swallow its cancellation and a thread cannot be ended at all. Neither may keep a run from returning.
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

from tunesmith.engine.event_loop.thread_calls import Threads
from tunesmith.user_lines import find_running_line, find_waiting_line

GRACE_S = 2.0
"""Seconds that tasks and threads are given to end by themselves."""
POLL_S = 0.02

logger = logging.getLogger(__name__)

_IDLE = concurrent.futures.thread._worker.__code__
"""What an idle thread of a pool is in."""


def close_loop(loop: asyncio.AbstractEventLoop, threads: Threads, threads_before: Collection[threading.Thread]) -> None:
    """Cancel what is left, wait for it for a moment, warn of what goes on, and close the loop."""
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
            logger.warning("user code still runs, and is left alone:\n  %s", "\n  ".join(left))
    finally:
        threads.shutdown(wait=False)
        loop.close()


def find_busy_threads() -> list[threading.Thread]:
    """Threads for which the interpreter would wait at its end: idle ones of a pool end by themselves."""
    frames = sys._current_frames()
    return [
        thread
        for thread in threading.enumerate()
        if not thread.daemon
        and thread is not threading.current_thread()
        and thread is not threading.main_thread()
        and (frame := frames.get(thread.ident or 0)) is not None
        and frame.f_code is not _IDLE
    ]


def describe_thread(thread: threading.Thread, function: Callable[..., Any] | None = None) -> str:
    """Its name, and the line it is at or what was called in it."""
    frame = sys._current_frames().get(thread.ident or 0)
    line = None if frame is None else find_running_line(frame)
    called = "" if function is None else f" in {getattr(function, '__qualname__', type(function).__name__)}"
    return f"thread {thread.name}{called}{_at(line)}"


def _find_threads(
    running: Mapping[threading.Thread, Callable[..., Any]], before: Collection[threading.Thread]
) -> list[threading.Thread]:
    return [*running, *(thread for thread in find_busy_threads() if thread not in before)]


def _cancel_tasks(loop: asyncio.AbstractEventLoop) -> list[asyncio.Task[Any]]:
    """Cancel every task; returns those that do not end."""
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
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # it is named by us
    return left


def _at(line: str | None) -> str:
    return "" if line is None else f" at {line}"
