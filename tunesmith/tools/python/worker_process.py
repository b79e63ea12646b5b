"""A worker process as the training process sees it: start, one call at a time, kill.

All methods block, and run in threads of the pool. A call ends with its answer or with `SandboxLostError`; a worker that
does not answer in time is killed. When the training process ends, the worker sees the end of its socket and ends all
that it started.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator

from tunesmith.config.tools import PythonToolSection
from tunesmith.errors import ConfigError, SandboxError
from tunesmith.tools.python.call import Call, Child, Control, PythonResult, SandboxLostError
from tunesmith.tools.python.folder import SandboxFolder, remove_folder
from tunesmith.tools.python.isolation import ADVICE, LaunchPlan, build_plan, find_installed_files, list_isolations

TIMEOUT_S = 120.0
"""Limit of the worker's own actions; generous, because packages are imported at its start."""
END_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


class WorkerProcess:
    """A running worker; at most one thread runs calls, any thread may kill it."""

    def __init__(self, plan: LaunchPlan, settings: PythonToolSection, *, is_session: bool) -> None:
        self._settings = settings
        self._is_session = is_session
        self._folder: str | None = plan.configuration["folder"]
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._is_killed = False
        self.is_usable = True
        """Whether the worker can run another call."""
        self._child: Child | None = None
        self._tmp_fd: int | None = None
        near, far = socket.socketpair()
        self._control = Control(near, timeout_s=TIMEOUT_S)
        with far:
            try:
                self._process = subprocess.Popen(
                    plan.command,
                    env=plan.environment,
                    cwd="/",
                    stdin=far.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except BaseException:
                self._control.close()
                raise
        try:
            with self._naming_its_end():
                self._tmp = self._start(plan)
                if (child := self._fork()) is None:
                    raise SandboxLostError("its temporary folder cannot be emptied")
                child.wait_ready(TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        # A worker that is ready writes nothing; each file counts where there are many workers.
        self._close_stderr()

    def run(self, code: str) -> PythonResult:
        """Run code, in a process of its own or in that of the session."""
        with self._naming_its_end():
            assert self._child is not None
            call = Call(self._child, self._control, code, self._settings, folder=self._tmp, is_session=self._is_session)
            result = call.run(start_timeout_s=TIMEOUT_S)
        if self._is_session and not result.is_state_lost:
            return result
        self._child.close()
        try:
            self.is_usable = self._fork() is not None
        except OSError:
            self.is_usable = False
        return result

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
        """Kill the worker, wait for its end, and release its files; only while no call runs."""
        if os.getpid() != self._owner:
            return
        self._wait()
        self._control.close()
        self._close_stderr()
        if self._child is not None:
            self._child.close()
        if self._tmp_fd is not None:
            os.close(self._tmp_fd)
            self._tmp_fd = None
        if self._folder is not None:
            remove_folder(self._folder)

    def _start(self, plan: LaunchPlan) -> SandboxFolder:
        """Configure the worker; its temporary folder, where this process finds it."""
        data = json.dumps(plan.configuration | {"is_session": self._is_session}).encode()
        self._control.send(len(data).to_bytes(4, "big") + data)
        _, (self._tmp_fd,) = self._control.read_report()
        # In a mount namespace the folder has no path outside; macOS has no paths of files, and no such namespace.
        if self._folder is None:
            return SandboxFolder(f"/proc/self/fd/{self._tmp_fd}", max_mb=None)
        return SandboxFolder(plan.configuration["tmp"], max_mb=self._settings.tmp_mb)

    def _fork(self) -> Child | None:
        """Have the next child forked, in a folder as new; None if the folder cannot be made so."""
        self._child = Child(self._control) if self._tmp.restore() else None
        return self._child

    @contextlib.contextmanager
    def _naming_its_end(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            self.kill()
            raise SandboxLostError("it did not answer in time") from error
        except ConnectionError as error:
            raise SandboxLostError(self._describe_end()) from error

    def _wait(self) -> None:
        self.kill()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("the process %d of a Python sandbox does not end", self._process.pid)

    def _describe_end(self) -> str:
        """What the worker wrote to standard error before it ended, if that was at its start."""
        was_killed = self._is_killed
        self._wait()
        stderr = self._process.stderr
        text = "" if was_killed or stderr is None or stderr.closed else stderr.read().decode(errors="replace").strip()
        return text or f"it ended with status {self._process.returncode}"

    def _close_stderr(self) -> None:
        if self._process.stderr is not None:
            with contextlib.suppress(OSError):
                self._process.stderr.close()


class Launcher:
    """Starts workers with the first kind of isolation that works; the first start finds it."""

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
        try:
            return self._launch(kind, is_session=is_session)
        except (SandboxLostError, OSError, ConfigError) as error:
            raise SandboxError(f"a Python sandbox ({kind}) cannot be started: {_describe_error(error)}") from error

    def _start_first(self, *, is_session: bool) -> WorkerProcess:
        find_installed_files(self._settings.packages)
        reasons = []
        for kind in list_isolations(self._settings):
            try:
                worker = self._launch(kind, is_session=is_session)
            except (SandboxLostError, OSError, ConfigError) as error:
                reasons.append(f"{kind}: {_describe_error(error)}")
                continue
            self._kind = kind
            if kind == "none":
                logger.warning("model-written Python code runs WITHOUT isolation (unsafe=True): %s", "; ".join(reasons))
            elif reasons:
                logger.info("Python sandbox: %s; not available: %s", kind, "; ".join(reasons))
            return worker
        listed = "".join(f"\n  {reason}" for reason in reasons)
        raise SandboxError(f"model-written Python code cannot be isolated on this machine: {ADVICE}{listed}")

    def _launch(self, kind: str, *, is_session: bool) -> WorkerProcess:
        plan = build_plan(kind, self._settings)
        try:
            return WorkerProcess(plan, self._settings, is_session=is_session)
        except BaseException:
            if plan.configuration["folder"] is not None:
                remove_folder(plan.configuration["folder"])
            raise


def _describe_error(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return f"{error}; a sandbox needs 7: raise the limit of open files (ulimit -n), or lower num_workers"
    return str(error)
