"""The program of a sandbox: runs one call at a time in a forked child and ends it at the limits.

Started by the pool with the interpreter of the sandbox. Frames on standard input and output are four bytes of length,
then JSON. The first one configures the worker, each further one holds code, and the answer is the outcome with the
output. In a process namespace the worker is process 1: code cannot signal it, and all processes of a call are killed
before the answer. Nothing that code writes is parsed: output is text, and of the status pipe one byte is read.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import selectors
import signal
import sys
import time
from typing import Any

from tunesmith.tools.python.child import MIB, PR_SET_DUMPABLE, Child, Config, SetupError
from tunesmith.tools.python.folder import (
    count_files_of_file_system,
    empty_folder,
    measure_folder,
    remove_folder,
)
from tunesmith.tools.python.landlock import build_ruleset, check
from tunesmith.tools.python.snippet import CPU_TIME, ERROR, MEMORY, OK

CHUNK_BYTES = 65536
MAX_REMOVED_FILES = 1000
"""A worker whose temporary folder holds more is replaced, which takes less time than to remove them."""
INTERRUPT_GRACE_S = 2.0
"""Seconds that code of a session has after an interrupt at the time limit; then its process is killed."""
MAX_FILES = 10_000
"""Files and folders in the temporary folder."""
FOLDER_CHECK_S = 0.1
COMMON_MODULES = (
    "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools", "heapq",
    "itertools", "json", "math", "operator", "random", "re", "statistics", "string", "time", "typing",
)  # fmt: skip
"""Imported once per worker, so that no call waits for them."""
OUTCOMES = {OK: "ok", ERROR: "error", MEMORY: "memory", CPU_TIME: "timeout"}


class SockFilterProgram(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def main() -> None:
    requests, replies = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (0, 1))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake = _install_wakeup()
    config = read_frame(requests)
    if config is None:
        return
    try:
        prepare(config)
        serve(config, requests, replies, wake)
    except (OSError, ImportError, SetupError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    finally:
        # The pool removes the folder of a worker that it ends; here it has ended itself.
        if config["folder"] is not None:
            remove_folder(config["folder"])


def serve(config: Config, requests: int, replies: int, wake: int) -> None:
    """Answer requests until there are no more, or until the temporary folder cannot be emptied."""
    child = Child(config)
    child.wait_ready()
    write_frame(replies, {})
    while (request := read_frame(requests)) is not None:
        call = Call(config, child, request["code"].encode("utf-8", "surrogatepass"))
        reply = call.run(requests, wake)
        if call.is_child_kept:
            write_frame(replies, reply)
            continue
        child.end()
        is_clean = empty_folder(config["tmp"], max_files=MAX_REMOVED_FILES)
        write_frame(replies, reply | {"is_worker_kept": is_clean})
        if not is_clean:
            return
        child = Child(config)
    child.end()


def _install_wakeup() -> int:
    """A file that becomes readable when a child ends."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    return wake_read


def prepare(config: Config) -> None:
    """Give up privileges, refuse to be traced, and import what code may need."""
    libc = config["libc"] = ctypes.CDLL(None, use_errno=True)
    if config["uid"] is not None:
        os.setgroups([])
        os.setresgid(*[config["uid"]] * 3)
        os.setresuid(*[config["uid"]] * 3)
    if sys.platform == "linux":
        check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
    os.chdir(config["tmp"])
    # The module `site`, which is not loaded, defines these.
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    for name in (*COMMON_MODULES, *config["preload"]):
        importlib.import_module(name)
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")
    readable = config["readable"]
    config["ruleset"] = None
    if readable is not None:
        config["ruleset"] = build_ruleset(libc, readable=readable, writable=[config["tmp"], os.devnull])
    if config["filter"] is not None:
        instructions = bytes.fromhex(config["filter"])
        config["filter"] = SockFilterProgram(len(instructions) // 8, instructions)
    # A collection in a child would copy the pages of all objects here.
    gc.collect()
    gc.freeze()


class Call:
    """Sends code to a child, collects its output up to the limit, and decides on the outcome."""

    def __init__(self, config: Config, child: Child, code: bytes) -> None:
        self._config = config
        self._child = child
        self._unsent = len(code).to_bytes(4, "big") + code
        self._output = {child.stdout: bytearray(), child.stderr: bytearray()}
        self._outcome: str | None = None
        self._reason = ""
        self._is_interrupted = False
        self._has_answered = False
        self._next_check = time.monotonic() + FOLDER_CHECK_S
        self._selector = selectors.DefaultSelector()

    @property
    def is_child_kept(self) -> bool:
        """The process of a session continues unless it ended or broke a limit."""
        return self._config["is_session"] and self._has_answered and self._outcome != "output_limit"

    def run(self, requests: int, wake: int) -> dict[str, Any]:
        """The answer to one request. The worker ends if the pool closes `requests` during the call."""
        child = self._child
        child.wait_ready()
        deadline = time.monotonic() + self._config["wall_s"]
        with self._selector:
            for fd in (requests, wake, child.status_pipe, *self._output):
                self._selector.register(fd, selectors.EVENT_READ)
            self._selector.register(child.code, selectors.EVENT_WRITE)
            while self._outcome is None:
                left_s = deadline - time.monotonic()
                for key, _ in self._selector.select(max(0.0, min(left_s, FOLDER_CHECK_S))):
                    self._handle(key.fd, requests, wake)
                if self._outcome is None and child.poll():
                    self._judge_end()
                self._check_folder()
                if self._outcome is None and left_s <= 0:  # last: an answer counts that came while this process waited
                    deadline += INTERRUPT_GRACE_S
                    self._time_out()
        for fd in self._output:
            self._read_output(fd)
        return self._describe()

    def _handle(self, fd: int, requests: int, wake: int) -> None:
        if fd == requests:
            self._child.end()
            sys.exit()
        elif fd == wake:
            os.read(wake, CHUNK_BYTES)
        elif fd == self._child.code:
            self._send_code()
        elif fd == self._child.status_pipe:
            self._read_status()
        elif not self._read_output(fd):
            self._selector.unregister(fd)

    def _send_code(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            self._unsent = self._unsent[os.write(self._child.code, self._unsent) :]
        if not self._unsent:
            self._selector.unregister(self._child.code)

    def _read_status(self) -> None:
        status = os.read(self._child.status_pipe, 1)
        if not status:
            # Closed by the code, or by the end of the process, which `poll` finds.
            self._selector.unregister(self._child.status_pipe)
            return
        self._has_answered = True
        self._outcome = "timeout" if self._is_interrupted else OUTCOMES.get(status, "error")
        self._reason = "cpu" if status == CPU_TIME else ""

    def _read_output(self, fd: int) -> bool:
        """Read what there is; False at the end of the pipe."""
        collected, limit = self._output[fd], self._config["max_output_bytes"]
        with contextlib.suppress(BlockingIOError):
            while len(collected) <= limit:
                chunk = os.read(fd, CHUNK_BYTES)
                if not chunk:
                    return False
                collected += chunk
            if self._outcome in (None, "ok", "error", "memory"):
                self._outcome = "output_limit"
        return True

    def _time_out(self) -> None:
        """Interrupt code of a session, once; end any other code."""
        if self._config["is_session"] and not self._is_interrupted:
            self._is_interrupted = True
            os.kill(self._child.pid, signal.SIGINT)
        else:
            self._outcome = "timeout"

    def _judge_end(self) -> None:
        """The outcome of a process that ended without an answer."""
        status = self._child.wait_status or 0
        if self._is_interrupted:
            self._outcome = "timeout"
            return
        if not os.WIFSIGNALED(status):
            code = os.waitstatus_to_exitcode(status)
            self._outcome = "ok" if code == 0 else "error"
            self._reason = f"the process exited with status {code}" if code else ""
            return
        number = os.WTERMSIG(status)
        if number == signal.SIGXCPU or (number == signal.SIGKILL and self._child.cpu_s >= self._config["cpu_s"]):
            self._outcome, self._reason = "timeout", "cpu"
        else:
            self._outcome, self._reason = "error", f"the process was killed by {signal.Signals(number).name}"

    def _check_folder(self) -> None:
        """Count files; where no file system of its own limits the size of the temporary folder, measure it too."""
        if self._outcome is not None or time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + FOLDER_CHECK_S
        path, limit_mb = self._config["tmp"], self._config["tmp_mb"]
        if limit_mb is None:
            is_full = count_files_of_file_system(path) > MAX_FILES
        else:
            is_full = measure_folder(path, max_bytes=limit_mb * MIB, max_files=MAX_FILES)
        if is_full:
            self._outcome, self._reason = "error", "the temporary folder is full"

    def _describe(self) -> dict[str, Any]:
        limit = self._config["max_output_bytes"]
        stdout, stderr = (bytes(part[:limit]).decode("utf-8", "replace") for part in self._output.values())
        return {
            "outcome": self._outcome,
            "reason": self._reason,
            "stdout": stdout,
            "stderr": stderr,
            "is_worker_kept": True,
            "is_state_lost": self._config["is_session"] and not self.is_child_kept,
        }


def read_frame(fd: int) -> dict[str, Any] | None:
    """The next frame, or None at the end."""
    header = _read(fd, 4)
    data = None if header is None else _read(fd, int.from_bytes(header, "big"))
    return None if data is None else json.loads(data)


def write_frame(fd: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    view = memoryview(len(data).to_bytes(4, "big") + data)
    while view:
        view = view[os.write(fd, view) :]


def _read(fd: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(fd, size - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


if __name__ == "__main__":
    main()
