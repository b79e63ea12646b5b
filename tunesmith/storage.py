"""The names of a run's files, and writing files so that a reader sees the old one or the new one whole.

A file is written under a temporary name beside its place, flushed to the disk, then renamed; so a kill at any moment
leaves either version and perhaps a temporary file, whose name ends in `.tmp-<pid>`. Whatever the operating system
refuses becomes a `StorageError` of one sentence.
"""

from __future__ import annotations

import errno
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
    """Where the files of one run are."""

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
        """The newest step that has had a checkpoint."""
        return self.root / "last_commit.json"


def parse_checkpoint_step(folder: Path) -> int:
    """The step in a checkpoint folder's name."""
    match = CHECKPOINT.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"{folder} is not named global_step_<number>")
    return int(match[1])


@contextmanager
def storage_errors(path: Path, action: str) -> Iterator[None]:
    """Turn the operating system's errors while we `action` (write, read, ...) `path` into one sentence."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        reason = REASONS.get(error.errno or 0) or error.strerror or str(error)
        raise StorageError(f"cannot {action} {path}: {reason}") from error


@contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when the block ends well, and leaves no trace when it fails."""
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
    """Write a text file whole, as UTF-8; half a surrogate pair becomes its escape, as JSON writes it."""
    with open_atomic(path) as file:
        file.write(text.encode(errors="backslashreplace"))


def save_json(path: Path, value: Any) -> None:
    """Write a JSON file whole."""
    save_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def load_json(path: Path) -> Any:
    """Read a JSON file."""
    with storage_errors(path, "read"):
        text = path.read_bytes()
    try:
        return json.loads(text.decode())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read {path}: it is not JSON ({error})") from error


def load_json_lines(path: Path) -> list[Any]:
    """Read a JSON Lines file; a text may hold the characters that Unicode, but not JSON, ends a line with."""
    with storage_errors(path, "read"):
        lines = path.read_text(encoding="utf-8").split("\n")
    try:
        return [json.loads(line) for line in lines if line.strip()]
    except json.JSONDecodeError as error:
        raise StorageError(f"cannot read {path}: a line of it is not JSON ({error})") from error


def compute_checksum(path: Path) -> str:
    """CRC-32 of a file in hexadecimal: it finds damage, not forgery, at several GiB a second."""
    checksum = 0
    with storage_errors(path, "read"), path.open("rb") as file:
        while chunk := file.read(CHECKSUM_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return f"{checksum:08x}"


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Bring a folder and all that is in it to the disk, as files that others may read as the umask allows."""
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
    """Refuse to begin a write of about `num_bytes` for which `folder` has no room."""
    with storage_errors(folder, "measure"):
        free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise StorageError(
            f"cannot write to {folder}: about {num_bytes / GIB:.2f} GiB ({num_bytes} bytes) are needed and "
            f"{free / GIB:.2f} GiB are free; free some, set keep_checkpoints, or choose another folder "
            "(checkpoint_root_dir of a run)"
        )


def remove_tree(folder: Path) -> None:
    """Remove a folder; a kill on the way leaves no part of it under its own name."""
    doomed = folder if TEMPORARY.search(folder.name) else folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    with storage_errors(folder, "remove"):
        if doomed != folder:
            shutil.rmtree(doomed, ignore_errors=True)
            folder.rename(doomed)
        shutil.rmtree(doomed)
