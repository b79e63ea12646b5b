"""How a command's process exits: error messages, exit statuses, and user threads that are still running."""

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

from tunesmith.cluster.rank_errors import is_launched, record_rank_error
from tunesmith.errors import LOST_DEVICE_ADVICE, TunesmithError, exit_on_signal

EXIT_GRACE_S = 5.0
"""Seconds that threads of user code may keep running after the command has finished."""


def run_guarded(work: Callable[[], None], *, is_debug: bool) -> None:
    """Print expected errors as one sentence on stderr and exit with status 1; SIGTERM exits with status 143."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, exit_on_signal)
    if is_debug:
        show_tracebacks()
    try:
        work()
    except (TunesmithError, ValueError, OSError, ImportError) as error:
        message = " ".join(str(error).split())
        record_rank_error(message, kind=type(error).__name__)
        if is_debug:
            raise
        if not is_launched():
            typer.echo(f"tunesmith: {message}", err=True)
        if LOST_DEVICE_ADVICE in message:
            exit_now(1)  # freeing memory of a lost device may abort an ordinary exit
        raise typer.Exit(1) from None


def show_tracebacks() -> None:
    """Log the traceback of every rollout that fails in user code."""
    logger = logging.getLogger("tunesmith.workflow")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(logging.StreamHandler())


def exit_now(status: int) -> None:
    """Exit without running destructors or exit handlers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def exit_despite_threads(ending: SystemExit) -> None:
    """Return once no user thread is running; after `EXIT_GRACE_S` exit the process despite running threads."""
    if threading.active_count() == 1:
        return
    # imports asyncio, which --help does not need
    from tunesmith.engine.event_loop.shutdown import describe_thread, find_busy_threads

    deadline = time.monotonic() + EXIT_GRACE_S
    while find_busy_threads() and time.monotonic() < deadline:
        time.sleep(0.02)
    busy = find_busy_threads()
    if busy:
        names = "; ".join(map(describe_thread, busy))
        typer.echo(f"tunesmith: exiting while user code is still running: {names}", err=True)
        atexit._run_exitfuncs()
        exit_now(ending.code if isinstance(ending.code, int) else int(ending.code is not None))
