"""Start and kill `tunesmith` commands in tests, and read the metrics of their runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path


class Zygote:
    """Runs `tunesmith` commands in `folder`, forked from a process that has imported everything (`zygote.py`)."""

    def __init__(self, folder: Path) -> None:
        script = Path(__file__).parent / "zygote.py"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(script)], cwd=folder, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout.readline().strip() == "ready"

    def run(self, arguments: list[str], *, kill_after_s: float | None = None) -> int:
        pid = self.start(arguments)
        timer = None
        if kill_after_s is not None:
            timer = threading.Timer(kill_after_s, os.kill, (pid, signal.SIGKILL))
            timer.start()
        status = self.wait()
        if timer is not None:
            timer.cancel()
        return status

    def start(self, arguments: list[str]) -> int:
        """Start a command; returns its process id."""
        self.process.stdin.write(json.dumps(arguments) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def wait(self) -> int:
        """The exit status of the command that was started last."""
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=30)


def read_metrics(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]
