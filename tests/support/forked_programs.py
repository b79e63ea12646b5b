"""Runs `tunesmith` commands, the ranks that they start, and Python programs as forks of a process that has imported
everything.

Importing torch and transformers takes longer than the short programs of tests; the process does it once for a run of
pytest, whose workers share it. A test asks the process for a fork, and waits if it is still importing. Where a program
would start Python, as the launcher of ranks does, it starts this file in its place: it passes its arguments,
environment and output to the process, waits for the fork, passes signals on to it, and ends as the fork has ended. So
the launcher sees processes that start, fail and are killed as ranks do.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import select
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
INTERPRETER = "TUNESMITH_TEST_INTERPRETER"
LOG = "program.log"


@dataclass(frozen=True)
class Fork:
    """A running program."""

    pid: int
    connection: socket.socket

    def wait(self) -> int:
        """The exit status; that of a program that a signal has killed is the negative number of the signal."""
        status = int.from_bytes(self.connection.recv(8), "big", signed=True)
        self.connection.close()
        return status

    def has_ended(self) -> bool:
        """Whether `wait` would return at once."""
        return bool(select.select([self.connection], [], [], 0)[0])

    def kill(self) -> None:
        """Send SIGKILL, unless the program has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def start_fork(path: str, words: list[str], folder: Path, environment: Mapping[str, str], output: list[int]) -> Fork:
    """Let the process at the socket run what `python WORDS` would. `output`: descriptors for stdout and stderr."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    request = json.dumps({"words": words, "folder": str(folder), "environment": dict(environment)}).encode()
    socket.send_fds(connection, [len(request).to_bytes(8, "big")], output)
    connection.sendall(request)
    return Fork(int.from_bytes(connection.recv(8), "big"), connection)


class ForkedPrograms:
    """The process, from the side of the tests. It runs the interpreter with these additions to the environment."""

    def __init__(self, python: str = sys.executable, environment: Mapping[str, str] | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="forks-"))
        self._socket, self._pids = self._folder / "socket", self._folder / "pids"
        self._interpreter = self._folder / "forked-python"
        words = [sys.executable, "-S", "-E", str(Path(__file__)), "fork", str(self._socket)]
        self._interpreter.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        self._interpreter.chmod(0o755)
        self._environment = (
            os.environ
            | {
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
                INTERPRETER: str(self._interpreter),
            }
            | dict(environment or {})
        )
        self._pids.touch()
        with socket.socket(socket.AF_UNIX) as listener:  # requests wait in it until the process has imported everything
            listener.bind(str(self._socket))
            listener.listen()
            self._process = subprocess.Popen(
                [python, __file__, "serve", str(listener.fileno()), str(self._pids)],
                env=self._environment, stdin=subprocess.PIPE, pass_fds=[listener.fileno()],
            )  # fmt: skip
        atexit.register(self.close)

    def run(self, words: list[str], *, folder: Path, environment: Mapping[str, str] | None = None) -> int:
        """Run `tunesmith ARGUMENTS`, `pip ARGUMENTS` or `python FILE` in the folder; returns the exit status."""
        return self.fork(words, folder=folder, environment=environment).wait()

    def fork(
        self, words: list[str], *, folder: Path, log: str = LOG, environment: Mapping[str, str] | None = None
    ) -> Fork:
        """Start such a program; its output is appended to the log in the folder."""
        assert words[0] in ("tunesmith", "python", "pip"), f"only tunesmith, python and pip are run, not {words[0]!r}"
        words = words[1:] if words[0] == "python" else ["-m", *words]
        with (folder / log).open("ab") as file:
            variables = self._environment | dict(environment or {})
            return start_fork(str(self._socket), words, folder, variables, [file.fileno()] * 2)

    def start(
        self, folder: Path, *arguments: str, environment: Mapping[str, str] | None = None, log: IO[str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a `tunesmith` command in the folder; its output goes to the log, or to a pipe."""
        return subprocess.Popen(
            [str(self._interpreter), "-m", "tunesmith", *arguments], cwd=folder,
            env=self._environment | dict(environment or {}), stdout=subprocess.PIPE if log is None else log,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def find_ranks(self, process: subprocess.Popen[str]) -> list[int]:
        """Process ids of the ranks that a command has started."""
        pids = dict(map(int, line.split()) for line in self._pids.read_text().splitlines())
        launcher = pids.get(process.pid)
        if launcher is None:
            return []
        try:
            started = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        except OSError:  # it has ended
            return []
        return [pids[int(pid)] for pid in started if int(pid) in pids]

    def close(self) -> None:
        """End the process and whatever it still runs."""
        atexit.unregister(self.close)
        try:
            self._process.communicate(b"end", timeout=30)
        except subprocess.TimeoutExpired:  # it still imports: the run was short, and the machine is busy
            self._process.kill()
        shutil.rmtree(self._folder)


@functools.cache
def start_forked_programs() -> ForkedPrograms:
    """The process of this run of pytest, started when it is first needed."""
    return ForkedPrograms()


def wait_for_fork(path: str, words: list[str]) -> None:
    """Let the process at the socket fork, and end as its fork ends."""
    fork = start_fork(path, words, Path.cwd(), os.environ, [1, 2])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: os.kill(fork.pid, received))
    status = fork.wait()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


class ForkServer:
    """The process that has imported everything; it ends when its standard input does, or has data."""

    def __init__(self, listener: int, pids: str) -> None:
        gc.disable()  # little of what is imported is garbage
        import torch
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        import tunesmith
        import tunesmith.cli
        import tunesmith.cluster.launch
        import tunesmith.monitor.tensorboard
        import tunesmith.tasks.load_library
        from tunesmith.garbage import frozen_objects

        get_checkpoint_conversion_mapping("")  # compiles a thousand patterns, which loading any model would
        for name in tunesmith.__all__:
            getattr(tunesmith, name)
        with contextlib.suppress(ImportError):  # an extra
            import agentscope  # noqa: F401
        torch.set_num_threads(1)
        sys.path.remove(str(Path(__file__).parent))
        self._pids = Path(pids)
        self._listener = socket.socket(fileno=listener)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        self._forks: dict[int, socket.socket] = {}
        gc.collect()
        gc.freeze()  # collections of the programs skip what is imported here
        gc.enable()
        with frozen_objects():  # counts them, so that the programs need not
            pass

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select(timeout=0.02 if self._forks else None):
                if key.fileobj is sys.stdin:
                    for pid in self._forks:
                        os.kill(pid, signal.SIGKILL)
                    return
                if key.fileobj is self._listener:
                    self._fork()
                else:  # what waits for the fork was killed
                    self._selector.unregister(key.fileobj)
                    for pid, connection in self._forks.items():
                        if connection is key.fileobj:
                            os.kill(pid, signal.SIGKILL)
            self._reap()

    def _fork(self) -> None:
        connection, _ = self._listener.accept()
        size, files, _, _ = socket.recv_fds(connection, 8, 2)
        request = json.loads(connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
        pid = os.fork()
        if pid == 0:
            self._listener.close()
            for each in (connection, *self._forks.values()):
                each.close()
            run_program(request, files)
        for file in files:
            os.close(file)
        waiting = int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)
        with self._pids.open("a") as file:
            file.write(f"{waiting} {pid}\n")
        self._forks[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ)
        connection.sendall(pid.to_bytes(8, "big"))

    def _reap(self) -> None:
        """Report the forks that have ended."""
        while self._forks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = self._forks.pop(pid)
            try:
                self._selector.unregister(connection)
                connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))
            except (KeyError, OSError):  # nothing waits for it
                pass
            connection.close()


def run_program(request: dict, files: list[int]) -> None:
    """Become the program. Does not return."""
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.executable = os.environ[INTERPRETER]
    added = [each for each in os.environ["PYTHONPATH"].split(os.pathsep) if each not in sys.path]
    sys.path[:0] = ["", *added]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # programs in the background ignore it
    status = 0
    try:
        run_words(request["words"])
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:  # noqa: BLE001 - reported by the exit status and in the output
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_words(words: list[str]) -> None:
    if words[:2] == ["-m", "tunesmith"]:
        from tunesmith.cli import main

        sys.argv = words[1:]
        main()
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "fork":
        wait_for_fork(sys.argv[2], sys.argv[3:])
    else:
        ForkServer(int(sys.argv[2]), sys.argv[3]).run()
