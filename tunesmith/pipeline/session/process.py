"""How the process of a command ends: one sentence for an error, a status for a signal, and no thread that keeps it."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import typer

from tunesmith.errors import LOST_DEVICE_ADVICE, TunesmithError, end_on_signal

EXIT_GRACE_S = 5.0
"""Seconds that threads of user code have to end once the command has done its work."""


def run_guarded(work: Callable[[], None], *, is_debug: bool) -> None:
    """Turn expected errors into one sentence on stderr and exit status 1, and SIGTERM into status 143."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end_on_signal)
    if is_debug:
        show_tracebacks()
    try:
        work()
    except (TunesmithError, ValueError, OSError, ImportError) as error:
        if is_debug:
            raise
        message = " ".join(str(error).split())
        typer.echo(f"tunesmith: {message}", err=True)
        if LOST_DEVICE_ADVICE in message:
            leave_at_once(1)  # what lies on a lost device cannot be freed: an ordinary exit may abort over it
        raise typer.Exit(1) from None


def show_tracebacks() -> None:
    """Print the traceback of every rollout that fails in user code."""
    logger = logging.getLogger("tunesmith.workflow")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(logging.StreamHandler())


def leave_at_once(status: int) -> None:
    """End the process without taking anything down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def leave_threads_behind(ending: SystemExit) -> None:
    """Return at once or after a moment where the process can end; else end it although threads still run."""
    if threading.active_count() == 1:
        return
    from tunesmith.engine.event_loop.shutdown import describe_thread, find_busy_threads  # asyncio, of no use to --help

    deadline = time.monotonic() + EXIT_GRACE_S
    while find_busy_threads() and time.monotonic() < deadline:
        time.sleep(0.02)
    busy = find_busy_threads()
    if busy:
        names = "; ".join(map(describe_thread, busy))
        typer.echo(f"tunesmith: ending although user code still runs: {names}", err=True)
        atexit._run_exitfuncs()
        leave_at_once(ending.code if isinstance(ending.code, int) else int(ending.code is not None))
