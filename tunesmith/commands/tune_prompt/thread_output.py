"""Silence what one thread prints, while others print as before.

DSPy prints progress bars and notes from its thread and has no switch for them. `contextlib.redirect_stdout` alone would
also silence the workflows and the run's own progress, which print from the event loop's thread meanwhile.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any, cast


class _OtherThreadsOnly:
    """A text stream that drops what one thread writes."""

    def __init__(self, stream: Any, thread: threading.Thread) -> None:
        self._stream = stream
        self._thread = thread

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return len(text) if threading.current_thread() is self._thread else self._stream.write(text)


@contextlib.contextmanager
def silence(thread: threading.Thread) -> Iterator[None]:
    """Within: nothing that `thread` writes to stdout and stderr is shown."""
    out, err = (cast(Any, _OtherThreadsOnly(stream, thread)) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield
