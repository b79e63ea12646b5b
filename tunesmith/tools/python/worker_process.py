"""A worker process as the training process sees it: start, one request at a time, kill.

All methods block, and run in threads of the pool. A request ends with its answer or with `WorkerLostError`; a worker
that does not answer in time is killed. When the training process ends, the worker sees the end of its input and ends
all that it started.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import threading
import time
from typing import Any

from tunesmith.config.tools import PythonToolSection
from tunesmith.errors import ConfigError, SandboxError
from tunesmith.tools.python.folder import remove_folder
from tunesmith.tools.python.installed import find_installed_files
from tunesmith.tools.python.isolation import ADVICE, LaunchPlan, build_plan, iter_plans

START_TIMEOUT_S = 120.0
"""Generous, because packages are imported at the start."""
ANSWER_GRACE_S = 60.0
"""Time beyond the wall time limit, which the worker itself enforces."""
END_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


class WorkerLostError(Exception):
    """The worker ended, was killed, or did not answer."""


class WorkerProcess:
    """A running worker; at most one thread sends requests, any thread may kill it."""

    def __init__(self, plan: LaunchPlan) -> None:
        self.isolation = plan.isolation
        self._folder = plan.folder
        self._answer_timeout_s = plan.configuration["wall_s"] + ANSWER_GRACE_S
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._is_killed = False
        self._process = subprocess.Popen(
            plan.command,
            env=plan.environment,
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._exchange(plan.configuration, START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def request(self, code: str) -> dict[str, Any]:
        """Run code; the answer of `worker.Call`."""
        return self._exchange({"code": code}, self._answer_timeout_s)

    def kill(self) -> None:
        """Signal the worker and all its processes to end, without waiting; harmless if it ended before."""
        with self._lock:
            # A forked copy of this process does not own the worker.
            if self._is_killed or os.getpid() != self._owner:
                return
            self._is_killed = True
            # The process is not reaped before: its id is not reused.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the worker, wait for its end, and release its files; only while no request runs."""
        if os.getpid() != self._owner:
            return
        self._wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        if self._folder is not None:
            remove_folder(self._folder)

    def _wait(self) -> None:
        self.kill()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("the process %d of a Python sandbox does not end", self._process.pid)

    def _exchange(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        data = json.dumps(message).encode()
        deadline = time.monotonic() + timeout_s
        try:
            self._write(len(data).to_bytes(4, "big") + data)
            reply: dict[str, Any] = json.loads(self._read(int.from_bytes(self._read(4, deadline), "big"), deadline))
            return reply
        except BrokenPipeError as error:
            raise WorkerLostError(self._describe_end()) from error

    def _write(self, data: bytes) -> None:
        """Blocks only while the worker, which is idle, reads."""
        assert self._process.stdin is not None
        fd = self._process.stdin.fileno()
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    def _read(self, size: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        data = bytearray()
        while len(data) < size:
            left_s = deadline - time.monotonic()
            if poller.poll(max(0.0, left_s * 1000)):
                chunk = os.read(fd, size - len(data))
                if not chunk:
                    raise WorkerLostError(self._describe_end())
                data += chunk
            elif left_s <= 0:
                self.kill()
                raise WorkerLostError("it did not answer in time")
        return bytes(data)

    def _describe_end(self) -> str:
        """What the worker wrote to standard error before it ended."""
        was_killed = self._is_killed
        self._wait()
        assert self._process.stderr is not None
        text = "" if was_killed else self._process.stderr.read().decode(errors="replace").strip()
        return text or f"it ended with status {self._process.returncode}"


class Launcher:
    """Starts workers with the first kind of isolation that works, which is found out at the first start."""

    def __init__(self, settings: PythonToolSection) -> None:
        self._settings = settings
        self._kind: str | None = None
        self._lock = threading.Lock()

    def start(self, *, is_session: bool = False) -> WorkerProcess:
        """A worker that is ready for code; `SandboxError` names why no kind of isolation works."""
        with self._lock:
            kind = self._kind
            if kind is None:
                return self._start_first(is_session=is_session)
        return self._start_kind(kind, is_session=is_session)

    def _start_first(self, *, is_session: bool) -> WorkerProcess:
        find_installed_files(self._settings.packages)
        reasons = []
        for kind, plan in iter_plans(self._settings, is_session=is_session):
            if isinstance(plan, ConfigError):
                reasons.append(f"{kind}: {plan}")
                continue
            try:
                worker = _launch(plan)
            except (WorkerLostError, OSError) as error:
                reasons.append(f"{kind}: {error}")
                continue
            self._kind = kind
            if worker.isolation == "none":
                logger.warning("model-written Python code runs WITHOUT isolation (unsafe=True): %s", "; ".join(reasons))
            elif reasons:
                logger.info("Python sandbox: %s; not available: %s", kind, "; ".join(reasons))
            return worker
        listed = "".join(f"\n  {reason}" for reason in reasons)
        raise SandboxError(f"model-written Python code cannot be isolated on this machine: {ADVICE}{listed}")

    def _start_kind(self, kind: str, *, is_session: bool) -> WorkerProcess:
        try:
            return _launch(build_plan(kind, self._settings, is_session=is_session))
        except (WorkerLostError, OSError, ConfigError) as error:
            raise SandboxError(f"a Python sandbox ({kind}) cannot be started: {error}") from error


def _launch(plan: LaunchPlan) -> WorkerProcess:
    try:
        return WorkerProcess(plan)
    except BaseException:
        if plan.folder is not None:
            remove_folder(plan.folder)
        raise
