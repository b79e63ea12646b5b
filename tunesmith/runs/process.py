"""How a command's process exits: error messages, exit statuses, and user threads that are still running."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from tunesmith.cluster.rank_info import is_launched, record_rank_error
from tunesmith.errors import LOST_DEVICE_ADVICE, TunesmithError, exit_on_signal, lacks_host_memory

EXIT_GRACE_S = 5.0
"""Seconds that threads of user code may keep running after the command has finished."""
LESS_HOST_MEMORY = (
    "end other programs, use a smaller model, or lower engine.kv_cache_gib and trainer.max_tokens_per_row; --resume "
    "continues a run from its last checkpoint"
)
REPEAT_AFTER_S = 0.05


def run_guarded(work: Callable[[], None], *, is_debug: bool) -> None:
    """Print expected errors as one sentence on stderr and exit with status 1; SIGTERM exits with status 143."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, exit_on_signal)
    if is_debug:  # the traceback of every rollout that fails in user code
        logger = logging.getLogger("tunesmith.workflow")
        logger.setLevel(logging.DEBUG)
        logger.addHandler(logging.StreamHandler())
    try:
        with repeated_signals():
            work()
    except Exception as error:
        message = describe_expected(error)
        if message is None:
            raise
        record_rank_error(message, kind=type(error).__name__)
        if is_debug:
            raise
        if not is_launched():
            typer.echo(f"tunesmith: {message}", err=True)
        if LOST_DEVICE_ADVICE in message:
            exit_now(1)  # freeing memory of a lost device may abort an ordinary exit
        raise typer.Exit(1) from None


def describe_expected(error: Exception) -> str | None:
    """The sentence, or list of them, that is printed for an error of input, of the run or of this host; None for other
    errors."""
    message = "\n- ".join(" ".join(each.split()) for each in str(error).split("\n- "))
    if isinstance(error, TunesmithError | ValueError | OSError | ImportError):
        return message
    if lacks_host_memory(error):
        return f"this host has too little free memory ({message or 'MemoryError'}): {LESS_HOST_MEMORY}"
    return None


@contextmanager
def repeated_signals() -> Iterator[None]:
    """Send SIGINT or SIGTERM again if Python dropped the exception of its handler, which ran in a weakref's callback or
    a destructor; imports have many of them."""
    previous = sys.unraisablehook

    def repeat(lost: sys.UnraisableHookArgs) -> None:
        error = lost.exc_value
        if isinstance(error, KeyboardInterrupt):
            number = signal.SIGINT
        elif isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM:
            number = signal.SIGTERM
        else:
            previous(lost)
            return
        threading.Timer(REPEAT_AFTER_S, os.kill, (os.getpid(), number)).start()

    sys.unraisablehook = repeat
    try:
        yield
    finally:
        sys.unraisablehook = previous


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
