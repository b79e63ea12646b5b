"""Comparison of expressions within a time limit.

math-verify computes what it reads: one power of large integers can take hours, and no signal interrupts it. So a
process compares; it starts with the first comparison, serves one at a time, and is killed and replaced if it does not
answer.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

from tunesmith.errors import RolloutError

START_TIMEOUT_S = 120.0
"""Generous, because sympy is imported at the start."""
ANSWER_TIMEOUT_S = 10.0
"""The process ends a comparison itself after `TIMEOUT_S` of its own, unless a single operation takes longer."""
PROGRAM = Path(__file__).with_name("expressions.py")
NUM_TRIES = 2
NO_ANSWER = object()
"""Instead of an answer that does not come in time."""


class ExpressionProcess:
    """A process that compares expressions, for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def compare(self, candidate: str | None, reference: str) -> bool | None:
        """Whether two expressions are equal; None if the reference cannot be read.

        Raises RolloutError if that is not known in time, which says nothing about the candidate.
        """
        for _ in range(NUM_TRIES):
            with self._lock:
                try:
                    process = self._find_process()
                    answer = self._ask(process, [candidate, reference], ANSWER_TIMEOUT_S)
                except OSError:  # it did not start, was killed from outside, or ran out of memory
                    self._end()
                    continue
                if answer is NO_ANSWER:
                    self._end()
            if answer is NO_ANSWER or answer == "late":
                raise RolloutError(f"math-verify did not compare {candidate!r} with {reference!r} in time")
            return None if answer is None else bool(answer)
        raise RolloutError(f"the process that compares expressions was lost {NUM_TRIES} times in one comparison")

    def close(self) -> None:
        """End the process; the next comparison starts another."""
        with self._lock:
            self._end()

    def forget(self) -> None:
        """In a forked copy of this process: the comparing process is not its own, and a thread may hold the lock."""
        self._lock, self._process = threading.Lock(), None

    def _find_process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is not for it
            )
            if self._ask(self._process, [None, "1"], START_TIMEOUT_S) is NO_ANSWER:
                raise TimeoutError("it did not start in time")
        return self._process

    @staticmethod
    def _ask(process: subprocess.Popen[bytes], request: list[str | None], timeout_s: float) -> object:
        """The answer, or `NO_ANSWER`; OSError if the process has ended."""
        assert process.stdin is not None and process.stdout is not None
        os.write(process.stdin.fileno(), json.dumps(request).encode() + b"\n")
        fd, deadline, answer = process.stdout.fileno(), time.monotonic() + timeout_s, b""
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        while not answer.endswith(b"\n"):
            if not poller.poll(max(deadline - time.monotonic(), 0.0) * 1000):
                return NO_ANSWER
            chunk = os.read(fd, 1024)
            if not chunk:
                raise BrokenPipeError
            answer += chunk
        found: object = json.loads(answer)
        return found

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


_process = ExpressionProcess()
atexit.register(_process.close)
os.register_at_fork(after_in_child=_process.forget)


def compare_in_time(candidate: str | None, reference: str) -> bool | None:
    """As `ExpressionProcess.compare`, with the process of this program."""
    return _process.compare(candidate, reference)
