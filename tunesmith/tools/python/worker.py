"""The program of a sandbox: forks a child for each call, and ends it. It never sees code, output or names of files.

A child starts as a copy of this process, with all of its memory. Nothing of one call may therefore pass through here,
or the next call could read it: the pool makes pipes for each child and sends the far ends, so that code and output
travel between the pool and the child alone; how a child ended is passed on in a buffer that is cleared; and it is the
pool that empties the temporary folder.

Standard input is a socket to the pool. First comes the configuration (four bytes of length, then JSON), which is
answered with a report `READY`. After that each command is one byte, and reports are records of one size:

    pool                            worker
    FORK with four files            a child is forked; it writes to its status pipe when it is ready
    CONTINUE, STOP                  a session's processes run only during its calls
    INTERRUPT                       SIGINT to the child
                                    ENDED: the child has ended; with its wait status and CPU time
                                    CPU_LIMIT: a session's child was killed
    END                             all processes of the call are killed; ENDED, if it was not reported; DONE

In a process namespace the worker is process 1: code cannot signal it, and a kill reaches all processes of a call.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time

from tunesmith.tools.python.child import Config, build_ruleset, check, run_child
from tunesmith.tools.python.folder import remove_folder

FORK, CONTINUE, STOP, INTERRUPT, END = b"f", b"c", b"s", b"i", b"e"
READY, ENDED, CPU_LIMIT, DONE = 1, 2, 3, 4
NUM_CHILD_FILES = 4
CPU_CHECK_S = 0.1
CPU_GRACE_S = 2.0
"""CPU seconds beyond the limit in which code of a session may react to `CpuTimeError`."""
PR_SET_DUMPABLE = 4
CAPABILITY_VERSION = 0x20080522
COMMON_MODULES = (
    "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools", "heapq",
    "itertools", "json", "math", "operator", "random", "re", "statistics", "string", "time", "typing",
)  # fmt: skip
"""Imported once per worker, so that no call waits for them."""


class Report(ctypes.Structure):
    """A report of the worker to the pool; `ENDED` has the wait status and the beginning of `struct rusage`."""

    _fields_ = [
        ("kind", ctypes.c_int),
        ("wait_status", ctypes.c_int),
        ("user_s", ctypes.c_long),
        ("user_us", ctypes.c_long),
        ("system_s", ctypes.c_long),
        ("system_us", ctypes.c_long),
        ("other_usage", ctypes.c_long * 14),
    ]


class SockFilterProgram(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def main() -> None:
    control = socket.socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 10))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake = _install_wakeup()
    config = _read_configuration(control)
    try:
        prepare(config)
        ForkServer(config, control, wake).serve()
    except (OSError, ImportError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    finally:
        # The pool removes the folder of a worker that it ends; here it has ended itself.
        if config["folder"] is not None:
            remove_folder(config["folder"])


def _install_wakeup() -> int:
    """A file that becomes readable when a child ends."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    return wake_read


def _read_configuration(control: socket.socket) -> Config:
    with control.makefile("rb", buffering=0) as stream:
        size, data = int.from_bytes(stream.read(4) or b"", "big"), bytearray()
        while len(data) < size and (chunk := stream.read(size - len(data))):
            data += chunk
    if not data:
        sys.exit("the pool has ended")
    config: Config = json.loads(data)
    return config


def prepare(config: Config) -> None:
    """Give up privileges, refuse to be traced, and import what code may need."""
    libc = config["libc"] = ctypes.CDLL(None, use_errno=True)
    if config["uid"] is not None:
        os.setgroups([])
        os.setresgid(*[config["uid"]] * 3)
        os.setresuid(*[config["uid"]] * 3)
    if sys.platform == "linux":
        # Give up the rights of root, which a worker keeps where the interpreter is readable by root alone.
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
        check(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
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


class ForkServer:
    """Forks children on command, one at a time."""

    def __init__(self, config: Config, control: socket.socket, wake: int) -> None:
        self._config = config
        self._libc = config["libc"]
        self._control = control
        self._wake = wake
        self._report = Report()
        self._group = 0
        """Process group of the call."""
        self._pid = 0
        """The child; 0 once it has been reaped."""
        self._max_cpu_s: float | None = None
        """CPU time of the child at which it is killed; None outside of calls of a session."""

    def serve(self) -> None:
        """Follow commands until the pool closes the socket."""
        # The pool measures and empties the temporary folder, which in a mount namespace has no path outside of it.
        folder = os.open(".", os.O_RDONLY)
        self._report.kind = READY
        socket.send_fds(self._control, [bytes(self._report)], [folder])
        os.close(folder)
        while True:
            timeout_s = None if self._max_cpu_s is None else CPU_CHECK_S
            ready, _, _ = select.select([self._control.fileno(), self._wake], [], [], timeout_s)
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            while self._reap(os.WNOHANG) > 0:
                pass
            if self._pid and self._max_cpu_s is not None and _read_cpu_s(self._pid) >= self._max_cpu_s:
                self._max_cpu_s = None
                self._send(CPU_LIMIT)
                os.kill(self._pid, signal.SIGKILL)
            if self._control.fileno() in ready and not self._follow():
                self._kill()
                return

    def _follow(self) -> bool:
        """Follow one command; False if the pool has closed the socket."""
        command, files, _, _ = socket.recv_fds(self._control, 1, NUM_CHILD_FILES)
        if command == FORK:
            self._fork(files)
        elif command == CONTINUE:
            if self._pid and sys.platform == "linux":  # other systems have no clock of another process
                self._max_cpu_s = _read_cpu_s(self._pid) + self._config["cpu_s"] + CPU_GRACE_S
            self._signal_all(signal.SIGCONT)
        elif command == STOP:
            self._max_cpu_s = None
            self._signal_all(signal.SIGSTOP)
        elif command == INTERRUPT and self._pid:
            os.kill(self._pid, signal.SIGINT)
        elif command == END:
            self._kill()
            self._send(DONE)
        return bool(command)

    def _fork(self, files: list[int]) -> None:
        self._group = self._pid = os.fork()
        if self._pid == 0:
            run_child(self._config, *files)
        for fd in files:
            os.close(fd)

    def _kill(self) -> None:
        """Kill all processes of the call and wait for their end; as process 1 the worker adopts orphans."""
        self._max_cpu_s = None
        self._signal_all(signal.SIGKILL)
        if self._pid:  # its group may not exist yet
            os.kill(self._pid, signal.SIGKILL)
        while (self._pid or os.getpid() == 1) and self._reap(0) >= 0:
            pass
        self._group = 0

    def _signal_all(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpid() == 1:
                os.kill(-1, number)
            elif self._group:
                os.killpg(self._group, number)

    def _reap(self, options: int) -> int:
        """Reap one process; its id, 0 if none has ended, -1 if there is none."""
        report, at = self._report, ctypes.addressof(self._report)
        while True:
            pid: int = self._libc.wait4(
                -1, ctypes.c_void_p(at + Report.wait_status.offset), options, ctypes.c_void_p(at + Report.user_s.offset)
            )
            if pid >= 0 or ctypes.get_errno() != errno.EINTR:
                break
        if pid == self._pid and pid > 0:
            self._pid = 0
            self._send(ENDED)
        ctypes.memset(at, 0, ctypes.sizeof(report))
        return pid

    def _send(self, kind: int) -> None:
        self._report.kind = kind
        self._control.sendall(self._report)
        self._report.kind = 0


def _read_cpu_s(pid: int) -> float:
    """CPU time of another process, from the clock that `clock_getcpuclockid` names."""
    return time.clock_gettime((~pid << 3) | 2)


if __name__ == "__main__":
    main()
