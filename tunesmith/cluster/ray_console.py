"""The console of the first rank, shown by the launcher: through a file that both hosts see.

Ray's own forwarding shows all actors, with prefixes; it is off in a cluster that the launcher joins, and their logs
stay in Ray's log folder.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

FILE = "console.log"


class CopiedStream(io.TextIOBase):
    """Writes to a stream and to a file."""

    def __init__(self, stream: TextIO, copy: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._copy = copy

    def write(self, text: str) -> int:
        self._copy.write(text)
        self._copy.flush()
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


@contextmanager
def copied_console(folder: Path) -> Iterator[None]:
    """Copy what this process prints to the file of the console."""
    streams = sys.stdout, sys.stderr
    with (folder / FILE).open("a", encoding="utf-8") as file:
        sys.stdout, sys.stderr = (CopiedStream(stream, file) for stream in streams)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = streams


def add_line(folder: Path, line: str) -> None:
    """Write a line to the console from another process."""
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


class ConsoleReader:
    """Shows what was written to the file since the last call."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._offset = 0

    def show(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            found = file.read()
        whole = found[: found.rfind(b"\n") + 1]  # a part of a line, or of a character, waits for the rest
        if whole:
            self._offset += len(whole)
            sys.stderr.write(whole.decode("utf-8", errors="replace"))
            sys.stderr.flush()
