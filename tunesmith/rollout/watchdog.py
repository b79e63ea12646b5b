"""Detects user code that blocks the event loop, and sums up the blocked time.

A synchronous call in a workflow (requests.get, time.sleep, a long computation) stops all other rollouts, and no timeout
can fire. A watchdog thread notices when the loop stays in one event, and logs the blocking line. Blocked time counts
toward the timeout of the rollout that blocked, not of the others. After `MAX_OVERRUNS` rollouts that blocked past their
timeout the phase is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Self

from tunesmith.errors import RolloutError
from tunesmith.user_lines import find_running_line, is_user_path

BLOCKED_LIMIT_S = 5.0
"""The loop counts as blocked after this time, or after a quarter of the rollout's timeout if that is shorter."""
MIN_BLOCKED_S = 0.25
"""Steps between two awaits shorter than this do not count as blocking."""
MAX_OVERRUNS = 3
"""The phase is aborted when this many of its rollouts have blocked past their timeout."""
NUM_SHOWN_FRAMES = 4
HANDLER = asyncio.Handle._run.__code__
"""The code in which an event loop runs each event."""
IMPORT_SYSTEM = "<frozen importlib"
WARNING = (
    "the event loop has been blocked for more than %g s by a synchronous call at %s; every rollout waits and no "
    "timeout can fire. Use an async client, or asyncio.to_thread. Blocked at:\n%s"
)


@dataclass(slots=True)
class BlockedTime:
    """Time for which one rollout's own code blocked the loop."""

    blocked_s: float = 0.0
    longest_s: float = 0.0
    line: str | None = None
    """The line of user code that blocked, if the watchdog thread saw it."""
    ended_at: float = -math.inf
    """When it last blocked, in seconds of `time.monotonic` without the time for which any rollout blocked."""


class EventLoopWatchdog:
    """Watches the event loop of a thread."""

    def __init__(self, logger: logging.Logger, limit_s: float) -> None:
        self._logger = logger
        self._limit_s = limit_s
        self._event: FrameType | None = None
        self._event_seen_at = 0.0
        self._blocking_line: str | None = None
        self._warned: set[str | None] = set()
        self._num_overruns = 0
        self._blocked_s = 0.0
        self._paused_at: float | None = None
        self._is_stopped = threading.Event()

    @property
    def blocked_s(self) -> float:
        """Seconds for which user code blocked the loop, over all rollouts, or the rollouts were paused."""
        return self._blocked_s + (0.0 if self._paused_at is None else time.monotonic() - self._paused_at)

    def pause(self) -> None:
        """Until `resume` rollouts wait for training: no rollout's time counts, and a blocked loop is not reported."""
        self._paused_at = time.monotonic()

    def resume(self) -> None:
        """Count time, and rollouts that block past their timeout, from here."""
        self._blocked_s, self._paused_at = self.blocked_s, None
        self._event, self._num_overruns = None, 0

    def record_step(self, run: BlockedTime, seconds: float) -> None:
        """Record how long a rollout's code ran between two awaits."""
        if seconds < MIN_BLOCKED_S:
            return
        self._blocked_s += seconds
        run.blocked_s += seconds
        run.ended_at = time.monotonic() - self.blocked_s
        if seconds > run.longest_s:
            run.longest_s = seconds
            run.line = self._blocking_line
        self._blocking_line = None

    def record_overrun(self, run: BlockedTime, *, timeout_s: float) -> None:
        """Record a rollout that blocked the loop past its timeout; raises RolloutError at the `MAX_OVERRUNS`-th."""
        self._num_overruns += 1
        if self._num_overruns >= MAX_OVERRUNS:
            raise RolloutError(
                f"{self._num_overruns} rollouts blocked the event loop past rollout.timeout_s={timeout_s:g}, the last "
                f"for {run.longest_s:.1f} s{'' if run.line is None else f' at {run.line}'}: every other rollout waits "
                "meanwhile. Use an async client, or call the blocking function through asyncio.to_thread"
            )

    @contextlib.contextmanager
    def watching(self) -> Iterator[Self]:
        """Within, a warning with the stack is logged when one event of this thread takes `limit_s` seconds; once per
        line."""
        thread_id = threading.get_ident()
        threading.Thread(target=self._watch, args=(thread_id,), name="tunesmith-watchdog", daemon=True).start()
        try:
            yield self
        finally:
            self._is_stopped.set()

    def _watch(self, thread_id: int) -> None:
        while not self._is_stopped.wait(self._limit_s / 4):
            self._look(thread_id)  # a function, because its frames must not keep tensors alive until the next look

    def _look(self, thread_id: int) -> None:
        """Note the event that the loop is in; log the line of user code in it once the event has lasted for long.

        Nothing is logged outside of event handlers, because an engine steps while the loop itself waits in its
        selector, nor for imports that the program makes. Frames outside of the handler started the loop: they may be
        user code, but they do not block.
        """
        frames = [entry for entry, _ in traceback.walk_stack(sys._current_frames().get(thread_id))]
        handler = next((index for index, entry in enumerate(frames) if entry.f_code is HANDLER), None)
        if handler is None or self._paused_at is not None:
            self._event = self._blocking_line = None
        elif frames[handler] is not self._event:  # many events in a row, each of them short, do not block
            self._event, self._event_seen_at, self._blocking_line = frames[handler], time.monotonic(), None
        elif time.monotonic() - self._event_seen_at > self._limit_s:
            paths = [entry.f_code.co_filename for entry in frames[:handler]]
            if any(path.startswith(IMPORT_SYSTEM) for path in paths) and not any(map(is_user_path, paths)):
                return
            line = self._blocking_line = find_running_line(frames[0], within=HANDLER)
            if line not in self._warned:
                self._warned.add(line)
                stack = "".join(traceback.format_stack(frames[0])[-NUM_SHOWN_FRAMES:])  # the loop may run on meanwhile
                self._logger.warning(WARNING, self._limit_s, line or "a place without user code", stack)
