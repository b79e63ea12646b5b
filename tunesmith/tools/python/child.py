"""One process that runs code: forked by the worker before the code arrives, limited, and killed after the call.

The child sends `READY` once its limits are set; an earlier error is one of the sandbox and never one of the code. It
then reads a request (four bytes of length, the number of the call, which is random, and code in UTF-8) and answers with
that number and one byte, the status of the code. In a session it waits for more code; otherwise it ends as an
interpreter does: it joins threads and calls exit handlers.

Code shares this process, so it may answer its own call early. It cannot answer a call in advance, whose number it does
not know: whatever else is written to the status pipe ends the process. What code can do to its interpreter, such as
replacing `print`, holds for the later calls of its session, as in a notebook.

Landlock rules say which files the process may read, and the one folder that it may change. They need no privileges and
no namespace, and Linux 5.13 or newer. They do not hide names and metadata of files.

Code runs as in a notebook: the value of a last bare expression is printed. Errors are printed to standard error with
the lines of the code. The namespace is that of a module `__main__`, fresh for a stateless call and kept in a session.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import ctypes
import linecache
import os
import random
import resource
import signal
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

OK, ERROR, MEMORY, CPU_TIME = b"0", b"1", b"m", b"c"


class CpuTimeError(BaseException):
    """The code of a session has used its CPU time."""


def build_module() -> types.ModuleType:
    """The module that code runs in; it takes the place of `__main__`, so that classes in it can be pickled."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    return module


def run_snippet(source: bytes, module: types.ModuleType, *, filename: str) -> bytes:
    """Run code; return `OK`, or one of the other statuses for an uncaught exception."""
    try:
        code = source.decode("utf-8", "surrogatepass")
        linecache.cache[filename] = (len(code), None, [f"{line}\n" for line in code.splitlines()], filename)
        _run(ast.parse(code, filename), module.__dict__, filename)
    except SystemExit as error:
        if error.code is None or error.code == 0:
            return OK
        print(f"SystemExit: {error.code}", file=sys.stderr)
        return ERROR
    except MemoryError as error:
        _print_error(error, filename)
        return MEMORY
    except CpuTimeError as error:
        _print_error(error, filename)
        return CPU_TIME
    except BaseException as error:  # noqa: BLE001 - whatever code raises is printed for the model
        _print_error(error, filename)
        return ERROR
    return OK


def _run(tree: ast.Module, namespace: dict[str, Any], filename: str) -> None:
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, filename, "exec"), namespace)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), filename, "eval"), namespace)
        if value is not None:
            print(value)


def _print_error(error: BaseException, filename: str) -> None:
    """Print the traceback from the first frame of the code on; at the memory limit, only the name of the error."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != filename:
        frames = frames.tb_next
    try:
        traceback.print_exception(type(error), error, frames)
    except BaseException:  # noqa: BLE001 - also a `__str__` of the code that raises
        print(type(error).__name__, file=sys.stderr)


CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
RETURN_ABI_VERSION = 1
PATH_BENEATH = 1
READ_FILE, READ_DIR = 0b0100, 0b1000
FILE_RIGHTS = 0b1100_0000_0000_0111
"""Rights that a rule on a file, not a folder, may have: execute, write, read, truncate, ioctl."""
NUM_RIGHTS_OF_ABI = (0, 13, 14, 15, 15, 16)


def build_ruleset(libc: Any, *, readable: Sequence[str], writable: Sequence[str]) -> int:
    """File descriptor of a ruleset; paths that do not exist are left out."""
    abi = libc.syscall(CREATE_RULESET, None, 0, RETURN_ABI_VERSION)
    if abi < 1:
        raise OSError("Landlock is not available: it needs Linux 5.13 or newer with CONFIG_SECURITY_LANDLOCK")
    rights = (1 << NUM_RIGHTS_OF_ABI[min(abi, len(NUM_RIGHTS_OF_ABI) - 1)]) - 1
    handled = ctypes.c_uint64(rights)
    ruleset = check(libc.syscall(CREATE_RULESET, ctypes.byref(handled), 8, 0), "landlock_create_ruleset")
    rules = [(path, READ_FILE | READ_DIR) for path in readable] + [(path, rights) for path in writable]
    for path, allowed in rules:
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, getattr(os, "O_PATH", 0) | os.O_CLOEXEC)
            limited = allowed & rights if Path(path).is_dir() else allowed & rights & FILE_RIGHTS
            rule = limited.to_bytes(8, sys.byteorder) + fd.to_bytes(4, sys.byteorder)
            check(libc.syscall(ADD_RULE, ruleset, PATH_BENEATH, rule, 0), f"landlock_add_rule for {path}")
            os.close(fd)
    return ruleset


def check(result: int, name: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


READY = b"r"
CODE_FD, STATUS_FD = 3, 4
NUM_NUMBER_BYTES = 16
MAX_FD = 4096
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SECCOMP_MODE_FILTER = 2
MIB = 1 << 20

Config = dict[str, Any]


def run_child(config: Config, code_read: int, stdout: int, stderr: int, status: int) -> NoReturn:
    """The child's life. It never returns into the worker's code."""
    try:
        os.dup2(stderr, 2)
        _move_files(code_read, stdout, stderr, status)
        _set_limits(config)
        os.closerange(STATUS_FD + 1, MAX_FD)
        _serve(config)
    except BaseException as error:  # noqa: BLE001 - the pool reports it
        os.write(2, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os._exit(0)


def _move_files(code_read: int, stdout: int, stderr: int, status: int) -> None:
    """Files 0 to 4 become the null device, output, errors, code and status."""
    null = os.open(os.devnull, os.O_RDWR)
    moved = [os.dup(fd) for fd in (null, stdout, stderr, code_read, status)]
    # Duplicates are above all originals, and originals above 4: no file is overwritten before it is moved.
    for fd, copy in enumerate(moved):
        os.dup2(copy, fd, inheritable=fd < CODE_FD)


def _set_limits(config: Config) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    limits = {
        "RLIMIT_AS": config["memory_mb"] * MIB,
        "RLIMIT_FSIZE": config["max_file_mb"] * MIB,
        "RLIMIT_NOFILE": config["max_open_files"],
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_NPROC": config["max_tasks"],
    }
    for name, value in limits.items():
        number = getattr(resource, name, None)
        # macOS has no working limit of the address space.
        if number is not None and value is not None and not (name == "RLIMIT_AS" and sys.platform == "darwin"):
            resource.setrlimit(number, (value, value))
    _set_cpu_limit(config)
    os.setsid()
    if sys.platform != "linux":
        return
    libc: ctypes.CDLL = config["libc"]
    check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    if config["ruleset"] is not None:
        # for good; needs NO_NEW_PRIVS
        check(libc.syscall(RESTRICT_SELF, config["ruleset"], 0), "landlock_restrict_self")
    if config["filter"] is not None:
        check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(config["filter"])), "prctl(PR_SET_SECCOMP)")


def _set_cpu_limit(config: Config) -> None:
    """A stateless call is killed; code of a session gets an exception, and the worker kills it if it goes on."""
    if not config["is_session"]:
        resource.setrlimit(resource.RLIMIT_CPU, (config["cpu_s"], config["cpu_s"] + 1))
        return
    signal.signal(signal.SIGXCPU, _raise_cpu_time)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used_s = int(usage.ru_utime + usage.ru_stime) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + config["cpu_s"], resource.RLIM_INFINITY))


def _raise_cpu_time(number: int, frame: FrameType | None) -> NoReturn:
    raise CpuTimeError("the CPU time of the call is used up")


def _serve(config: Config) -> None:
    # Line-buffered: what was printed before a kill is read.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _open_output(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _open_output(2)  # type: ignore[misc]
    module = build_module()
    random.seed(0)
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed(0)
    os.write(STATUS_FD, READY)
    pid = os.getpid()
    num_calls = 0
    while (request := _read_request()) is not None:
        number, source = request
        num_calls += 1
        name = f"<python {num_calls}>" if config["is_session"] else "<python>"
        status = run_snippet(source, module, filename=name)
        if not config["is_session"]:
            with contextlib.suppress(BaseException):
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        if os.getpid() != pid:
            # A process that the code forked has come to the end of the code.
            os._exit(0)
        os.write(STATUS_FD, number + status)
        if config["is_session"]:
            _set_cpu_limit(config)


def _open_output(fd: int) -> Any:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _read_request() -> tuple[bytes, bytes] | None:
    """The number of the call, and its code."""
    header = _read(4 + NUM_NUMBER_BYTES)
    code = None if header is None else _read(int.from_bytes(header[:4], "big"))
    return None if header is None or code is None else (header[4:], code)


def _read(size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(CODE_FD, size - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
