"""File names of a run folder, and atomic writes: readers see the complete old or the complete new file.

A file is written to a temporary name in the same folder, synced to disk, then renamed. A kill at any moment leaves one
of the two versions and possibly a temporary file, whose name ends in `.tmp-<pid>`. Errors of the operating system
become a `StorageError` of one sentence.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tunesmith.errors import StorageError

TEMPORARY = re.compile(r"\.tmp-\d+$")
CHECKPOINT = re.compile(r"global_step_(\d+)$")
DONE = "DONE.json"
"""The file of a folder that is written last: a folder that has it is complete."""
GIB = 2**30
CHECKSUM_CHUNK_BYTES = 2**24

REASONS = {
    errno.ENOSPC: "no space is left on the disk; free some, or choose another folder (checkpoint_root_dir of a run)",
    errno.EDQUOT: "the disk quota is used up; free some space, or choose another folder (checkpoint_root_dir of a run)",
    errno.EACCES: "permission denied; choose a folder that you may write (checkpoint_root_dir of a run)",
    errno.EPERM: "permission denied; choose a folder that you may write (checkpoint_root_dir of a run)",
    errno.EROFS: "the file system is read-only; choose another folder (checkpoint_root_dir of a run)",
}


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Paths of the files in a run folder."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def lock(self) -> Path:
        return self.root / "run.lock"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def error(self) -> Path:
        """File with the error that stopped the run; removed when the run is resumed."""
        return self.root / "error.json"

    @property
    def monitor(self) -> Path:
        return self.root / "monitor"

    @property
    def tensorboard(self) -> Path:
        return self.monitor / "tensorboard"

    def tracker_id(self, tracker: str) -> Path:
        return self.monitor / f"{tracker}.id"

    def rollouts(self, step: int) -> Path:
        return self.root / "rollouts" / f"step_{step:06d}.parquet"

    def evaluation(self, step: int) -> Path:
        return self.root / "eval" / f"step_{step:06d}.json"

    def selection(self, step: int) -> Path:
        return self.root / "selection" / f"step_{step:06d}.json"

    def checkpoint(self, step: int) -> Path:
        return self.root / f"global_step_{step}"

    @property
    def last_commit(self) -> Path:
        """File that records the newest step that had a checkpoint."""
        return self.root / "last_commit.json"

    @property
    def best(self) -> Path:
        """Link to the checkpoint with the best evaluation."""
        return self.root / "best"

    @property
    def best_record(self) -> Path:
        """File that records the step and the value of the best evaluation."""
        return self.root / "best.json"

    @property
    def stopped(self) -> Path:
        """File that records why a run ended before its last step."""
        return self.root / "stopped.json"


def parse_checkpoint_step(folder: Path) -> int:
    """The step number in the name of a checkpoint folder."""
    match = CHECKPOINT.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"{folder} is not named global_step_<number>")
    return int(match[1])


def find_checkpoints(run_root: Path) -> list[Path]:
    """The committed checkpoints of a run, oldest first."""
    if not run_root.is_dir():
        return []
    found = [path for path in run_root.iterdir() if CHECKPOINT.fullmatch(path.name) and (path / DONE).is_file()]
    return sorted(found, key=parse_checkpoint_step)


def find_last_checkpoint(run_root: Path) -> Path | None:
    """The newest committed checkpoint of a run, or None."""
    return next(reversed(find_checkpoints(run_root)), None)


def is_locked(path: Path) -> bool:
    """Whether a living process of this machine holds the run's lock."""
    try:
        os.kill(int(path.read_text()), 0)  # a dead holder needs no attempt to lock, which a run that starts would see
    except PermissionError:
        pass
    except (OSError, ValueError):
        return False
    with path.open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def storage_errors(path: Path, action: str) -> Iterator[None]:
    """Convert OSErrors of the block into a StorageError; `action` is a verb such as write or read."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        reason = REASONS.get(error.errno or 0) or error.strerror or str(error)
        raise StorageError(f"cannot {action} {path}: {reason}") from error


@contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` if the block succeeds and is removed if it raises."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with storage_errors(path, "write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def save_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically; lone surrogates are escaped, as in JSON."""
    with open_atomic(path) as file:
        file.write(text.encode(errors="backslashreplace"))


def save_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    save_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def save_link(path: Path, target: str) -> None:
    """Replace `path` atomically by a symbolic link to a neighbor."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with storage_errors(path, "write"):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(path)
        sync_folder(path.parent)


def load_json(path: Path) -> Any:
    """Read a JSON file."""
    with storage_errors(path, "read"):
        text = path.read_bytes()
    try:
        return json.loads(text.decode())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read {path}: it is not JSON ({error})") from error


def load_json_lines(path: Path) -> list[Any]:
    """Read a JSON Lines file; only \\n separates lines, as text may contain other Unicode line separators."""
    with storage_errors(path, "read"):
        lines = path.read_text(encoding="utf-8").split("\n")
    try:
        return [json.loads(line) for line in lines if line.strip()]
    except json.JSONDecodeError as error:
        raise StorageError(f"cannot read {path}: a line of it is not JSON ({error})") from error


def compute_checksum(path: Path) -> str:
    """CRC-32 of a file in hexadecimal; detects damage, not tampering, at several GiB per second."""
    checksum = 0
    with storage_errors(path, "read"), path.open("rb") as file:
        while chunk := file.read(CHECKSUM_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return f"{checksum:08x}"


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Sync a folder and its contents to disk, and give files the permissions of the umask."""
    umask = os.umask(0)
    os.umask(umask)
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            path = Path(parent, name)
            path.chmod(0o666 & ~umask)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(parent))


def check_free_space(folder: Path, num_bytes: int) -> None:
    """Raise StorageError if the disk of `folder` has less than `num_bytes` of free space."""
    with storage_errors(folder, "measure"):
        free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise StorageError(
            f"cannot write to {folder}: about {num_bytes / GIB:.2f} GiB ({num_bytes} bytes) are needed and "
            f"{free / GIB:.2f} GiB are free; free some, set keep_checkpoints, or choose another folder "
            "(checkpoint_root_dir of a run)"
        )


def remove_tree(folder: Path) -> None:
    """Remove a folder; an interrupted removal leaves no partial folder under the original name."""
    temporary = folder if TEMPORARY.search(folder.name) else folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    with storage_errors(folder, "remove"):
        if temporary != folder:
            shutil.rmtree(temporary, ignore_errors=True)
            folder.rename(temporary)
        shutil.rmtree(temporary)


def remove_stale_folders(root: Path) -> None:
    """Remove temporary folders that killed processes left next to `root`; those of running processes stay."""
    for path in root.parent.iterdir() if root.parent.is_dir() else ():
        name, _, process_id = path.name.rpartition(".tmp-")
        if name == root.name and process_id.isdigit() and not is_running(int(process_id)):
            remove_tree(path)


def is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process_id != os.getpid()
