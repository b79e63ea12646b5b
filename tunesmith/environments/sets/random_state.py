"""State of the process-wide random generators that belongs to one environment.

Some packages draw from `random` and `numpy.random` themselves. Around each of their calls the environment's own state
is installed and the former one restored, so that episodes do not depend on others of the process, nor a run on them.
All such calls run in the one thread of `ONE_THREAD`, so that they hold up the event loop no longer than Python's switch
of threads, and the time limit of a step holds; a lock keeps calls of other threads apart. Code on the event loop that
draws from the process-wide generators during a call would draw from the environment's state; Tunesmith's own does not.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO, cast

import numpy as np

ONE_THREAD = ThreadPoolExecutor(1, thread_name_prefix="tunesmith-random-state")
_lock = threading.RLock()


class OwnRandomState:
    """The generators of one environment."""

    def __init__(self, seed: int) -> None:
        self._state: Any = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """A block that draws from this state and prints nothing."""
        with _lock, contextlib.redirect_stdout(cast(Any, WithoutThread(sys.stdout, threading.current_thread()))):
            saved = swap_state(self._state)
            try:
                yield
            finally:
                self._state = swap_state(saved)


class WithoutThread:
    """A stream that drops what one thread writes, and passes on what others do: `contextlib.redirect_stdout` alone
    would silence workflows and the run's own progress too, which print from other threads meanwhile."""

    def __init__(self, stream: TextIO, thread: threading.Thread) -> None:
        self._stream = stream
        self._thread = thread

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return len(text) if threading.current_thread() is self._thread else self._stream.write(text)


@contextlib.contextmanager
def silence(thread: threading.Thread) -> Iterator[None]:
    """Within: nothing that `thread` writes to stdout and stderr is shown."""
    out, err = (cast(Any, WithoutThread(stream, thread)) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


def swap_state(state: Any) -> Any:
    """Install a state of the process-wide generators; returns the former one."""
    former = random.getstate(), np.random.get_state()
    random.setstate(state[0])
    np.random.set_state(state[1])
    return former
