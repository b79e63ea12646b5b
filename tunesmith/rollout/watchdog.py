"""Warns when user code blocks the event loop.

A synchronous call inside a workflow (requests.get, time.sleep, a big computation) stops every other rollout, and no
timeout can fire meanwhile. A thread sees that the loop stopped turning and says where it is stuck.
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

BLOCKED_LIMIT_S = 30.0
NUM_SHOWN_FRAMES = 12
WARNING = (
    "the event loop has been blocked for more than %g s by a synchronous call; every rollout waits and no timeout can "
    "fire. Use an async client, or asyncio.to_thread. Blocked at:\n%s"
)


@contextlib.contextmanager
def watch_loop(logger: logging.Logger, *, limit_s: float = BLOCKED_LIMIT_S) -> Iterator[None]:
    """Warn once, with the blocking stack, if the running loop does not turn for `limit_s` seconds."""
    watchdog = _Watchdog(asyncio.get_running_loop(), logger, limit_s)
    thread = threading.Thread(target=watchdog.watch, name="tunesmith-watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        watchdog.is_done.set()


class _Watchdog:
    def __init__(self, loop: asyncio.AbstractEventLoop, logger: logging.Logger, limit_s: float) -> None:
        self._loop = loop
        self._logger = logger
        self._limit_s = limit_s
        self._thread_id = threading.get_ident()
        self._last_turn = time.monotonic()
        self.is_done = threading.Event()

    def watch(self) -> None:
        """Runs in its own thread."""
        while not self.is_done.wait(self._limit_s / 4):
            stack = self._find_stack() if time.monotonic() - self._last_turn > self._limit_s else None
            if stack is not None:
                self._logger.warning(WARNING, self._limit_s, stack)
                return
            try:
                self._loop.call_soon_threadsafe(self._note_turn)
            except RuntimeError:  # the loop was closed
                return

    def _note_turn(self) -> None:
        self._last_turn = time.monotonic()

    def _find_stack(self) -> str | None:
        """The loop thread's stack; None where the loop itself takes long to wait, as when an engine steps meanwhile."""
        frame = sys._current_frames().get(self._thread_id)
        if frame is None:
            return None
        frames = [entry for entry, _ in traceback.walk_stack(frame)]
        is_in_callback = any(entry.f_code is asyncio.Handle._run.__code__ for entry in frames)
        return "".join(traceback.format_stack(frame)[-NUM_SHOWN_FRAMES:]) if is_in_callback else None
