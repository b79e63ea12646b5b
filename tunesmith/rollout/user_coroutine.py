"""A coroutine of user code, driven so that it cannot change what others run under.

Torch's modes are its own between two awaits. Its turns are timed: one that takes long has blocked the event loop, and
every other rollout with it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Generator
from typing import Any, Generic, TypeVar

from tunesmith.model.torch_modes import UserModes
from tunesmith.rollout.watchdog import BlockedTime, EventLoopWatchdog
from tunesmith.user_lines import find_waiting_line

Output = TypeVar("Output")


class UserCoroutine(Generic[Output]):
    """Await it once."""

    def __init__(self, awaitable: Awaitable[Output], watchdog: EventLoopWatchdog, run: BlockedTime) -> None:
        """Blocked turns are noted in the watchdog as the run's."""
        self._awaitable = awaitable
        self._watchdog = watchdog
        self._run = run

    def find_line(self) -> str | None:
        """The line at which it waits."""
        return find_waiting_line(self._awaitable)

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
            except BaseException as thrown:  # noqa: BLE001 - what is thrown in belongs to the user's coroutine
                error = thrown
