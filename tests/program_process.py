"""Runs `tunesmith` commands and Python programs in forks of one process that has imported everything.

Importing torch and transformers takes most of the time of a short program; the process does it once for all tests of a
pytest worker. It reads one JSON line for each program: its folder, its words, and the file in the folder that its
output is appended to. It prints the program's id, and its exit status when it ends.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOG = "program.log"


class ProgramProcess:
    """The process, from the side of the tests. It runs one program at a time."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._running: int | None = None

    def run(self, words: list[str], *, folder: Path) -> int:
        """Run `tunesmith ARGUMENTS` or `python FILE` in the folder; returns the exit status."""
        self.start(words, folder=folder)
        return self.wait()

    def start(self, words: list[str], *, folder: Path, log: str = LOG) -> int:
        """Start a program; returns its process id."""
        assert self._running is None, "a program is running"
        assert words[0] in ("tunesmith", "python"), f"only tunesmith and python are run, not {words[0]!r}"
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(folder), words, log]) + "\n")
        self._process.stdin.flush()
        self._running = self._read()
        return self._running

    def wait(self) -> int:
        """The exit status of the program that was started."""
        status = self._read()
        self._running = None
        return status

    def kill(self) -> None:
        """End the program that a failed test has left running, if there is one."""
        if self._running is not None:
            os.kill(self._running, signal.SIGKILL)
            self.wait()

    def _read(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self.kill()
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=30)


@functools.cache
def start_program_process() -> ProgramProcess:
    """The process of this pytest worker, started when it is first needed."""
    process = ProgramProcess()
    atexit.register(process.close)
    return process


def run_program(folder: str, words: list[str], log: str) -> None:
    """Become the program: its folder, arguments, path and output. Does not return."""
    os.chdir(folder)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # programs in the background ignore it
    sys.path.insert(0, "")
    status = 0
    try:
        if words[0] == "tunesmith":
            from tunesmith.cli import app

            app(words[1:], standalone_mode=True)
        else:
            sys.argv = words[1:]
            runpy.run_path(words[1], run_name="__main__")
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:  # noqa: BLE001 - reported by the exit status and in the log
        traceback.print_exc()
        status = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    import torch

    import tunesmith.api  # noqa: F401

    torch.set_num_threads(1)
    sys.path.remove(str(Path(__file__).parent))
    gc.freeze()  # collections of the programs skip what is imported here
    for line in sys.stdin:
        folder, words, log = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run_program(folder, words, log)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
