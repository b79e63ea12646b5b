"""Who may end a run before its end: Ctrl-C and SIGTERM, and nobody else.

The first signal cancels the main task, so that rollouts are ended and files closed; the second interrupts whatever
runs, such as user code that blocks the loop; the third ends the process. What user code does to tasks that are not its
own is an error with its line.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from types import FrameType
from typing import Any, TypeVar

from tunesmith.errors import RolloutError, exit_on_signal
from tunesmith.user_lines import find_calling_line, find_error_line

T = TypeVar("T")

logger = logging.getLogger(__name__)


class MainTask(asyncio.Task[T]):
    """The task that a run is; it knows who cancelled it."""

    cancelled_at: str | None = None

    def cancel(self, msg: Any | None = None) -> bool:
        self.cancelled_at = self.cancelled_at or find_calling_line()
        return super().cancel(msg)


class Interrupts:
    """Handles signals while the main task runs, where no handler of the user's does."""

    def __init__(self, loop: asyncio.AbstractEventLoop, main: MainTask[Any]) -> None:
        self._loop = loop
        self._main = main
        self._count = 0
        self._before: dict[int, Any] = {}
        self.signal_number: int | None = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number, ours in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, exit_on_signal)):
                handler = signal.getsignal(number)
                if handler in (signal.SIG_DFL, ours):
                    self._before[number] = handler
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def raise_signal(self) -> None:
        """Raise what the signal stands for, if there was one."""
        if self.signal_number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal_number is not None:
            raise SystemExit(128 + self.signal_number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        self.signal_number = number
        name = signal.Signals(number).name
        if self._count == 1 and not self._main.done():
            os.write(2, f"tunesmith: {name}: ending the run; once more interrupts what it does\n".encode())
            self._main.cancel()
            self._loop.call_soon_threadsafe(lambda: None)
        elif self._count <= 2:
            self.raise_signal()
        else:
            os.write(2, f"tunesmith: {name}: ending at once\n".encode())
            os._exit(128 + number)


def run_main(loop: asyncio.AbstractEventLoop, main: MainTask[T], interrupts: Interrupts) -> T:
    """The result of the main task, whatever user code does to it or to the loop."""
    while True:
        try:
            result = loop.run_until_complete(main)
        except asyncio.CancelledError as error:
            interrupts.raise_signal()
            where = "" if main.cancelled_at is None else f", at {main.cancelled_at}"
            raise RolloutError(
                f"user code cancelled tasks of the run{where}: cancel only tasks that it made itself, not all of "
                "asyncio.all_tasks()"
            ) from error
        except SystemExit as error:
            if main.done() or interrupts.signal_number is not None:
                raise
            logger.warning(
                "user code raised SystemExit in a task or callback of its own, at %s: only whoever awaits it fails",
                find_error_line(error) or "an unknown line",
            )
        else:
            return result
