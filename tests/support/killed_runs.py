"""Start and kill `tunesmith` commands in tests, kill a process in the middle of a write, and read metrics of runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from conditions import wait_until
from forked_programs import Fork, start_forked_programs

LOG = "zygote.log"


@dataclass
class Zygote:
    """Runs `tunesmith` commands in `folder`, one at a time, forked from a process that has imported everything. Their
    output is in `zygote.log`."""

    folder: Path
    _running: Fork | None = None

    def run(self, arguments: list[str]) -> int:
        self.start(arguments)
        return self.wait()

    def kill(self, arguments: list[str], *, when: Callable[[], bool]) -> None:
        """Run a command until the condition is true, then kill it."""
        pid = self.start(arguments)
        wait_until(lambda: when() or self._running.has_ended(), interval_s=0.001)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL, (self.folder / LOG).read_text()

    def start(self, arguments: list[str]) -> int:
        """Start a command; returns its process id."""
        assert self._running is None, "a command is running"
        self._running = start_forked_programs().fork(["tunesmith", *arguments], folder=self.folder, log=LOG)
        return self._running.pid

    def wait(self) -> int:
        """The exit status of the command that was started last."""
        status = self._running.wait()
        self._running = None
        return status

    def close(self) -> None:
        """End the command that a failed test has left running, if there is one."""
        if self._running is not None:
            self._running.kill()
            self.wait()


def count_metrics(run: Path) -> int:
    """Lines of metrics that a run has written."""
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def read_metrics(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


def kill_at_call(number: int, names: Sequence[str] = ("fsync", "rename", "replace", "rmdir", "unlink")) -> None:
    """Make this process kill itself on entry to its `number`-th call that syncs data or changes names on disk."""
    calls = 0

    def wrap(call):
        def killing(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return killing

    for name in names:
        setattr(os, name, wrap(getattr(os, name)))
