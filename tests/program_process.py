"""Runs `tunesmith` commands and Python programs in forks of one process that has imported everything.

Importing torch and transformers takes most of the time of a program of a page; the process does it once. It reads one
JSON line for each program, its folder and its words, and prints its exit status. Output goes to `LOG` in the folder.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parent.parent
LOG = "program.log"


class ProgramProcess:
    """The process, from the side of the tests."""

    def __enter__(self) -> Self:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *_: Any) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def run(self, words: list[str], *, folder: Path) -> int:
        """Run `tunesmith ARGUMENTS` or `python FILE` in the folder; returns the exit status."""
        assert words[0] in ("tunesmith", "python"), f"only tunesmith and python are run, not {words[0]!r}"
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(folder), words]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def run_program(folder: str, words: list[str]) -> None:
    """Become the program: its folder, arguments, path and output. Does not return."""
    os.chdir(folder)
    log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
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
    for line in sys.stdin:
        folder, words = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run_program(folder, words)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
