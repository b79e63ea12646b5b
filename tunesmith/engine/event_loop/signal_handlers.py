"""Ctrl-C and SIGTERM, and protection of the main task from user code.

While a run makes steps, the first signal lets it finish and save the step (`StopAfterStep`). The next signal cancels
the main task, so that rollouts are cancelled and files closed; the one after interrupts whatever runs, such as user
code that blocks the loop; one more ends the process. Signals reach only the main thread; a run in another thread is
interrupted by `interrupt_thread`. User code that cancels the main task is reported as an error with
the line that did it.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import threading
from types import FrameType
from typing import Any, ClassVar, Self, TypeVar

from tunesmith.cluster.rank_info import shows_console
from tunesmith.errors import RolloutError, exit_on_signal
from tunesmith.user_lines import find_calling_line, find_error_line

T = TypeVar("T")

logger = logging.getLogger(__name__)


class MainTask(asyncio.Task[T]):
    """The task of a whole run; it records the line of user code that cancelled it."""

    cancelled_at: str | None = None

    def cancel(self, msg: Any | None = None) -> bool:
        self.cancelled_at = self.cancelled_at or find_calling_line()
        return super().cancel(msg)


class _Handlers:
    """Handles SIGINT and SIGTERM within, unless the user installed handlers for them.

    In another thread than the main one, where no signal arrives, `interrupt_thread` takes the place of SIGINT.
    """

    replaced: tuple[type, ...] = ()
    """Handlers of ours that these replace."""
    of_threads: ClassVar[dict[int, Any]]
    """Thread ident -> the handlers in it; the main thread is not in it."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                is_replaced = isinstance(getattr(handler, "__self__", None), self.replaced)
                if is_replaced or handler in (signal.SIG_DFL, signal.default_int_handler, exit_on_signal):
                    self._previous[number] = handler
                    signal.signal(number, self._handle)
        else:
            self.of_threads[threading.get_ident()] = self
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self.of_threads.pop(threading.get_ident(), None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        raise NotImplementedError


class SignalHandlers(_Handlers):
    """Handles signals while the main task runs."""

    of_threads: ClassVar[dict[int, SignalHandlers]] = {}

    def __init__(self, loop: asyncio.AbstractEventLoop, main: MainTask[Any]) -> None:
        super().__init__()
        self._loop = loop
        self._main = main
        self._num_signals = 0

    def cancel_main(self) -> bool:
        """Cancel the main task from another thread, as the first SIGINT does; False if it was cancelled before."""
        if self.signal_number is not None or self._main.done():
            return False
        self.signal_number = signal.SIGINT
        show_signal(signal.SIGINT, ENDING)
        self._loop.call_soon_threadsafe(self._main.cancel)
        return True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        self.signal_number = number
        if self._num_signals == 1 and not self._main.done():
            show_signal(number, ENDING)
            self._main.cancel()
            self._loop.call_soon_threadsafe(lambda: None)
        elif self._num_signals <= 2:
            raise_signal(number)
        else:
            os.write(2, f"tunesmith: {signal.Signals(number).name}: ending at once\n".encode())
            os._exit(128 + number)


class StopAfterStep(_Handlers):
    """Within: the first Ctrl-C or SIGTERM is recorded in `signal_number`, for a loop that ends after its step. The next
    one is handled as outside."""

    replaced = (SignalHandlers,)
    of_threads: ClassVar[dict[int, StopAfterStep]] = {}

    def request(self, number: int) -> bool:
        """Let the loop end after its step; False if it was asked before."""
        if self.signal_number is not None:
            return False
        self.signal_number = number
        show_signal(number, "finishing and saving this step; a second signal ends the run at once")
        return True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.request(number):
            return
        previous = self._previous[number]
        if callable(previous):
            previous(number, frame)
        else:
            signal.signal(number, previous)
            os.kill(os.getpid(), number)


def raise_signal(number: int | None) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    if number is not None:
        raise SystemExit(128 + number)


ENDING = "ending the run; another signal interrupts the running code"


def show_signal(number: int, text: str) -> None:
    """Print how a signal is handled, once for all ranks; a handler must not use the locks of `sys.stderr`."""
    if shows_console():
        os.write(2, f"tunesmith: {signal.Signals(number).name}: {text}\n".encode())


def interrupt_thread(thread: threading.Thread) -> bool:
    """Interrupt a run in another thread, as Ctrl-C in the main thread: the first call lets it finish its step, the next
    cancels its main task. Without steps and main task, or after these calls, KeyboardInterrupt is raised in the code
    that the thread runs; returns whether it was.
    """
    ident = thread.ident
    if ident is None or not thread.is_alive():
        return False
    stop, handlers = StopAfterStep.of_threads.get(ident), SignalHandlers.of_threads.get(ident)
    is_asked = stop is not None and stop.request(signal.SIGINT)
    if is_asked or (handlers is not None and handlers.cancel_main()):
        return False
    show_signal(signal.SIGINT, "interrupting the running code")
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(KeyboardInterrupt))
    return True


def run_main(loop: asyncio.AbstractEventLoop, main: MainTask[T], handlers: SignalHandlers) -> T:
    """The result of the main task; SystemExit in other tasks is only logged, cancellation by user code is an error."""
    while True:
        try:
            result = loop.run_until_complete(main)
        except asyncio.CancelledError as error:
            raise_signal(handlers.signal_number)
            where = "" if main.cancelled_at is None else f", at {main.cancelled_at}"
            raise RolloutError(
                f"user code cancelled tasks of the run{where}: cancel only tasks that it made itself, not all of "
                "asyncio.all_tasks()"
            ) from error
        except SystemExit as error:
            if main.done() or handlers.signal_number is not None:
                raise
            logger.warning(
                "user code raised SystemExit in its own task or callback, at %s: only code that awaits it fails",
                find_error_line(error) or "an unknown line",
            )
        else:
            return result
