"""Runs `tunesmith` commands and the ranks that they start as forks of one process that has imported everything.

Each rank of a run imports torch and transformers, which takes longer than the runs of tests. Here the launcher starts
this file in place of Python; it passes its arguments, environment and files to the process, which forks, waits for the
fork, passes signals on to it, and ends as the fork has ended. So the launcher sees processes that start, fail and are
killed as ranks do.
"""

from __future__ import annotations

import json
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

INTERPRETER = "TUNESMITH_TEST_INTERPRETER"


class ForkedRanks:
    """The process, from the side of the tests; `folder` is for its own files."""

    def __init__(self, folder: Path) -> None:
        self._socket, self._pids = folder / "forks.socket", folder / "forks.pids"
        self._interpreter = folder / "forked-python"
        words = [sys.executable, "-S", "-E", str(Path(__file__)), "fork", str(self._socket)]
        self._interpreter.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        self._interpreter.chmod(0o755)
        self._environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            INTERPRETER: str(self._interpreter),
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, "serve", str(self._socket), str(self._pids)],
            env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout.readline().strip() == "ready"

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
        self._process.stdin.close()
        self._process.wait(timeout=30)


def wait_for_fork(path: str, arguments: list[str]) -> None:
    """Let the process at the socket fork, and end as its fork ends."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    request = json.dumps({"arguments": arguments, "folder": str(Path.cwd()), "environment": dict(os.environ)}).encode()
    socket.send_fds(connection, [len(request).to_bytes(8, "big")], [1, 2])
    connection.sendall(request)
    pid = int.from_bytes(connection.recv(8), "big")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: os.kill(pid, received))
    status = int.from_bytes(connection.recv(8), "big", signed=True)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


class ForkServer:
    """The process that has imported everything; it ends with its standard input."""

    def __init__(self, path: str, pids: str) -> None:
        import torch

        import tunesmith.api  # noqa: F401

        torch.set_num_threads(1)
        self._pids = Path(pids)
        self._pids.touch()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        self._forks: dict[int, socket.socket] = {}
        print("ready", flush=True)

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select(timeout=0.02):
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
            run_command(request, files)
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


def run_command(request: dict, files: list[int]) -> None:
    """Become the command. Does not return."""
    from tunesmith.cli import main

    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.executable = os.environ[INTERPRETER]
    sys.argv = ["tunesmith", *request["arguments"][2:]]
    sys.path.remove(str(Path(__file__).parent))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 0
    try:
        main()
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:  # noqa: BLE001 - reported by the exit status and in the output
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "fork":
        wait_for_fork(sys.argv[2], sys.argv[3:])
    else:
        ForkServer(sys.argv[2], sys.argv[3]).run()
