"""Run `tunesmith` commands on several CPU ranks, forked from a process that has imported everything once.

Run as a program, it reads a line of JSON for each command, prints the process ids of its ranks, and their exit statuses
when all have ended.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path


class ForkedRanks:
    """The parent of the ranks of one command at a time, which run in `folder`."""

    def __init__(self, folder: Path) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, __file__], cwd=folder, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout.readline().strip() == "ready"

    def run(self, name: str, *overrides: str, num_ranks: int = 1, options: tuple[str, ...] = ()) -> Path:
        """The folder of a run that must end well."""
        self.start(name, *overrides, num_ranks=num_ranks, options=options)
        assert self.wait() == [0] * num_ranks, self.read_log()
        return self.folder / "runs/AgentScope" / name

    def start(self, name: str, *overrides: str, num_ranks: int = 1, options: tuple[str, ...] = ()) -> list[int]:
        """Start `tunesmith tune run.yaml`; returns the process ids of the ranks."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        (self.folder / "zygote.log").unlink(missing_ok=True)
        settings = [part for each in (f"name={name}", *overrides) for part in ("--set", each)]
        command = {"arguments": ["tune", "run.yaml", *settings, *options], "num_ranks": num_ranks, "port": port}
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def wait(self) -> list[int]:
        """The exit statuses of the ranks that were started last."""
        return json.loads(self.process.stdout.readline())

    def read_log(self) -> str:
        """What these ranks have printed."""
        return (self.folder / "zygote.log").read_text()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=30)


def fork_rank(rank: int, command: dict) -> int:
    from zygote import run_command

    pid = os.fork()
    if pid == 0:
        number, port = command["num_ranks"], command["port"]
        if number > 1:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
        run_command(command["arguments"])
    return pid


def main() -> None:
    import torch

    import tunesmith.api
    import tunesmith.pipeline.rl.tune  # noqa: F401

    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        pids = [fork_rank(rank, command) for rank in range(command["num_ranks"])]
        print(json.dumps(pids), flush=True)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(statuses), flush=True)


if __name__ == "__main__":
    main()
