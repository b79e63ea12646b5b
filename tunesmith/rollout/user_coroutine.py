"""Drives a coroutine of user code, isolated from other rollouts on the same thread.

Torch modes (gradients, inference mode, autocast, default dtype) set by the coroutine apply to it only; they are swapped
in and out around each step, that is the code between two awaits. Each step is timed: a long one has blocked the event
loop and all other rollouts.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Generator
from typing import Any, Generic, TypeVar

from tunesmith.model.torch_modes import UserModes
from tunesmith.rollout.sync_code import ThreadCall
from tunesmith.rollout.watchdog import BlockedTime, EventLoopWatchdog
from tunesmith.user_lines import find_waiting_line

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
