"""Finds user code that blocks the event loop, and keeps the account of the time that this took from others.

A synchronous call inside a workflow (requests.get, time.sleep, a big computation) stops every other rollout, and no
timeout can fire meanwhile. A thread sees that the loop stopped turning and says where it is stuck. When the call comes
back, its run has overrun its time and the others are given theirs back; runs that do so again and again end the phase.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from tunesmith.errors import RolloutError
from tunesmith.user_lines import find_running_line

BLOCKED_LIMIT_S = 5.0
"""The loop is called blocked after this time, or after a quarter of the time that a run may take."""
MIN_BLOCKED_S = 0.25
"""What takes less time between two awaits is not counted as blocking."""
MAX_OVERRUNS = 3
"""Runs that may block past their time in one phase; the last of them ends it."""
NUM_SHOWN_FRAMES = 4
WARNING = (
    "the event loop has been blocked for more than %g s by a synchronous call at %s; every rollout waits and no "
    "timeout can fire. Use an async client, or asyncio.to_thread. Blocked at:\n%s"
)


@dataclass(slots=True)
class BlockedTime:
    """What one run's own code took from the loop."""

    blocked_s: float = 0.0
    longest_s: float = 0.0
    line: str | None = None
    """The line of user code that was seen to block."""


@contextlib.contextmanager
def watch_event_loop(logger: logging.Logger, *, limit_s: float = BLOCKED_LIMIT_S) -> Iterator[EventLoopWatchdog]:
    """Warn, with the blocking stack, whenever the running loop does not turn for `limit_s` seconds; once a line."""
    watchdog = EventLoopWatchdog(asyncio.get_running_loop(), logger, limit_s)
    thread = threading.Thread(target=watchdog.watch, name="tunesmith-watchdog", daemon=True)
    thread.start()
    try:
        yield watchdog
    finally:
        watchdog.is_done.set()


class EventLoopWatchdog:
    """Watches the event loop of the thread that makes it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, logger: logging.Logger, limit_s: float) -> None:
        self._loop = loop
        self._logger = logger
        self._limit_s = limit_s
        self._thread_id = threading.get_ident()
        self._last_turn = time.monotonic()
        self._blocking_line: str | None = None
        self._warned: set[str | None] = set()
        self._num_overruns = 0
        self.blocked_s = 0.0
        """Seconds for which user code of all runs blocked the loop."""
        self.is_done = threading.Event()

    def record_step(self, run: BlockedTime, seconds: float) -> None:
        """A run's code ran for so long without awaiting anything."""
        if seconds < MIN_BLOCKED_S:
            return
        self.blocked_s += seconds
        run.blocked_s += seconds
        if seconds > run.longest_s:
            run.longest_s = seconds
            run.line = self._blocking_line
        self._blocking_line = None

    def record_overrun(self, run: BlockedTime, *, timeout_s: float) -> None:
        """A run blocked the loop past its time; raises RolloutError when that happened too often."""
        self._num_overruns += 1
        if self._num_overruns >= MAX_OVERRUNS:
            raise RolloutError(
                f"{self._num_overruns} rollouts blocked the event loop past rollout.timeout_s={timeout_s:g}, the last "
                f"for {run.longest_s:.1f} s{'' if run.line is None else f' at {run.line}'}: every other rollout waits "
                "meanwhile. Use an async client, or call the blocking function through asyncio.to_thread"
            )

    def watch(self) -> None:
        """Runs in its own thread."""
        while not self.is_done.wait(self._limit_s / 4):
            if time.monotonic() - self._last_turn > self._limit_s:
                self._look()
            try:
                self._loop.call_soon_threadsafe(self._mark_alive)
            except RuntimeError:  # the loop was closed
                return

    def _mark_alive(self) -> None:
        self._last_turn = time.monotonic()
        self._blocking_line = None

    def _look(self) -> None:
        """Note where the loop's thread is; nothing is said where the loop itself takes long to wait, as when an engine
        steps meanwhile."""
        frame = sys._current_frames().get(self._thread_id)
        if frame is None:
            return
        frames = [entry for entry, _ in traceback.walk_stack(frame)]
        if not any(entry.f_code is asyncio.Handle._run.__code__ for entry in frames):
            return
        self._blocking_line = find_running_line(frame)
        if self._blocking_line not in self._warned:
            self._warned.add(self._blocking_line)
            stack = "".join(traceback.format_stack(frame)[-NUM_SHOWN_FRAMES:])
            self._logger.warning(WARNING, self._limit_s, self._blocking_line or "a place without user code", stack)
