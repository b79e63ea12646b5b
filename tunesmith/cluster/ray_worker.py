"""The program of a worker of Ray Train: it takes its place among the ranks, then does the work of the launcher.

The launcher's function arrives pickled, and is read after the environment is set, because libraries read their
variables when they are imported. Torch is not needed here.

The launcher shows the console of the first rank through a file that both hosts see. Ray's own forwarding shows all
actors, with prefixes; it is off in a cluster that the launcher joins, and their logs stay in Ray's folder.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tunesmith.cluster.rank_info import RAY_WORKER, use_loopback
from tunesmith.errors import LOST_DEVICE_ADVICE, RankError, TunesmithError

CAUSE_FIRST_S = 1.0
"""Seconds that a rank which lost another one waits before it fails, so that the cause is seen first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayJob:
    """The work and the surroundings that every worker receives."""

    work: bytes
    """The pickled function; it takes whether the run was restarted."""
    directory: str
    environment: Mapping[str, str]
    """Variables of the launcher, for workers that do not have them."""
    import_paths: Sequence[str]
    shared_folder: str
    """A folder of this launch that all hosts see."""
    is_one_host: bool
    has_console: bool
    """Whether the launcher shows the console of the first rank, instead of Ray."""


class FinalError(Exception):
    """An error that a restart would meet again: a wrong setting, failing agents, an update that cannot be trusted."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind
        """Name of the error's class."""
        self.message = message


def run_worker(job: RayJob) -> bytes | None:
    """Do the launcher's work as one rank; the first rank returns its pickled result."""
    set_surroundings(job)
    join_ranks(job)
    address, port, is_restart = meet(job)
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    is_first = os.environ["RANK"] == "0"
    console = copied_console(Path(job.shared_folder)) if is_first and job.has_console else nullcontext()
    try:
        with console:
            result = pickle.loads(job.work)(is_restart)
        return pickle.dumps(result) if is_first else None
    except RankError:
        time.sleep(CAUSE_FIRST_S)
        raise
    except (TunesmithError, ValueError, ImportError) as error:
        message = " ".join(str(error).split())
        if LOST_DEVICE_ADVICE in message:
            raise
        raise FinalError(type(error).__name__, message) from error


def set_surroundings(job: RayJob) -> None:
    """The launcher's working directory, import paths and variables."""
    for name, value in job.environment.items():
        os.environ.setdefault(name, value)
    sys.path += [path for path in job.import_paths if path not in sys.path]
    try:
        os.chdir(job.directory)
    except OSError as error:
        raise FinalError("ConfigError", f"{socket.gethostname()} cannot enter {job.directory}: {error}") from error


def join_ranks(job: RayJob) -> None:
    """Set torchrun's variables from Ray's."""
    import ray.train  # optional

    context = ray.train.get_context()
    os.environ.update(
        {
            RAY_WORKER: "1",
            "RANK": str(context.get_world_rank()),
            "WORLD_SIZE": str(context.get_world_size()),
            "LOCAL_RANK": str(context.get_local_rank()),
            "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        }
    )
    if job.is_one_host:
        use_loopback()


def meet(job: RayJob) -> tuple[str, int, bool]:
    """Address and port at which ranks meet, and whether they met before, chosen by the first; called by each."""
    import ray.util  # optional
    from ray.train.collective import broadcast_from_rank_zero

    meeting = None
    if os.environ["RANK"] == "0":
        # a file, since no process of an earlier attempt is left when Ray starts the workers again
        started = Path(job.shared_folder) / "started"
        is_restart = started.exists()
        started.touch()
        address = ray.util.get_node_ip_address()
        # Ray broadcasts the address, because torch's process group does not exist yet: ranks meet to make it.
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        meeting = (address, port, is_restart)
    found: tuple[str, int, bool] = broadcast_from_rank_zero(meeting)
    return found


FILE = "console.log"


class CopiedStream(io.TextIOBase):
    """Writes to a stream and to a file."""

    def __init__(self, stream: TextIO, copy: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._copy = copy

    def write(self, text: str) -> int:
        self._copy.write(text)
        self._copy.flush()
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


@contextmanager
def copied_console(folder: Path) -> Iterator[None]:
    """Copy what this process prints to the file of the console."""
    streams = sys.stdout, sys.stderr
    with (folder / FILE).open("a", encoding="utf-8") as file:
        sys.stdout, sys.stderr = (CopiedStream(stream, file) for stream in streams)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = streams


def add_line(folder: Path, line: str) -> None:
    """Write a line to the console from another process."""
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


class ConsoleReader:
    """Shows what was written to the file since the last call."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._offset = 0

    def show(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            found = file.read()
        whole = found[: found.rfind(b"\n") + 1]  # a part of a line, or of a character, waits for the rest
        if whole:
            self._offset += len(whole)
            sys.stderr.write(whole.decode("utf-8", errors="replace"))
            sys.stderr.flush()
