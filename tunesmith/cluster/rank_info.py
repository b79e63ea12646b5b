"""Which rank this process is, and the network of ranks on one host; the error that a failed rank leaves for its
launcher, in torchrun's file; and the end of a rank with its launcher. From the environment, without torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tunesmith.errors import ConfigError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
RAY_WORKER = "TUNESMITH_RAY_WORKER"
"""Variable that is set in the workers of a run that Ray has started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """A process among those that were started for one run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Index among the processes of this host, and of its GPU."""
    local_size: int = 1
    """Processes of this host."""
    address: str = "127.0.0.1"
    """Host and port at which ranks meet."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def find_rank_info() -> RankInfo:
    """The place of this process; a single process if the variables are not set."""
    environment = os.environ
    if "WORLD_SIZE" not in environment:
        return RankInfo()
    missing = [name for name in VARIABLES if not environment.get(name, "").isdigit()]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={environment['WORLD_SIZE']} says that several processes run, but {missing[0]} is not a "
            "number: start them with torchrun, or unset WORLD_SIZE"
        )
    rank, world_size, local_rank = (int(environment[name]) for name in VARIABLES)
    if rank >= world_size:
        raise ConfigError(f"RANK={rank} is not below WORLD_SIZE={world_size}: start the processes with torchrun")
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_size=int(environment.get("LOCAL_WORLD_SIZE", world_size)),
        address=f"{environment.get('MASTER_ADDR', '')}:{environment.get('MASTER_PORT', '')}",
    )


def shows_console() -> bool:
    """Whether this process prints lines that every rank would print: it is the first rank, or the only process."""
    return "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0"


def is_ray_worker() -> bool:
    """Whether this process is a rank that Ray has started."""
    return RAY_WORKER in os.environ


def use_loopback() -> None:
    """Let gloo use the loopback interface, all that ranks of one host need, unless the user chose another."""
    for name in {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable with the path of the file, set by torchrun."""
LAUNCHED = "TUNESMITH_LAUNCHED"
"""Variable with the process id of `tunesmith` if it has started this rank itself, and prints its error."""
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Variable that torchrun's agent, in its own program or in `tunesmith`, sets for ranks."""
WATCH_NAME = "tunesmith-launcher-watch"
WATCH_INTERVAL_S = 0.5
GRACE_S = 30.0


def is_launched() -> bool:
    """Whether the launcher prints errors of this process."""
    return LAUNCHED in os.environ


def record_rank_error(message: str, *, kind: str) -> None:
    """Write the error of this rank for the launcher; nothing if torchrun has not started this process."""
    path = os.environ.get(ERROR_FILE)
    if path is None:
        return
    extra = {"py_callstack": kind, "timestamp": str(int(time.time()))}
    try:
        with Path(path).open("w", encoding="utf-8") as file:
            json.dump({"message": {"message": message, "extraInfo": extra}}, file)
    except OSError:
        return  # the launcher then reports the exit status


def watch_launcher() -> None:
    """From now on, end this rank once its launcher was killed: with SIGTERM, and after `GRACE_S` at once.

    Nothing if neither `tunesmith` nor torchrun has started this process, or if the watch runs already.
    """
    if TORCHRUN not in os.environ or any(thread.name == WATCH_NAME for thread in threading.enumerate()):
        return
    threading.Thread(target=_watch, args=(os.getppid(),), name=WATCH_NAME, daemon=True).start()


def _watch(parent: int) -> None:
    launcher = int(os.environ.get(LAUNCHED, parent))  # one that was killed before this began is not the parent now
    while os.getppid() == parent and (parent == launcher or _is_running(launcher)):
        time.sleep(WATCH_INTERVAL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs as another user
        return True
    return True
