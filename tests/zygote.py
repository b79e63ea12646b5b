"""A process that imports everything once and forks a `tunesmith` command for each line of JSON arguments on stdin.

Tests of resuming start and kill many commands; importing torch and transformers once makes that cheap. For each line it
prints the process id of the command, and its exit status when it ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback


def run_command(arguments: list[str]) -> None:
    from tunesmith.cli import app

    log = os.open("zygote.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # programs in the background ignore it
    status = 0
    try:
        app(arguments, standalone_mode=True)
    except SystemExit as ending:
        status = int(ending.code or 0)
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
    print("ready", flush=True)
    for line in sys.stdin:
        arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run_command(arguments)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
