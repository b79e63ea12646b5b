"""File names of a run folder, atomic writes, locks and journals.

A file or folder is written to a temporary name in the same folder, synced to disk, then renamed, so readers see the
complete old or the complete new one. A kill at any moment leaves one of the two and possibly a temporary, whose name
ends in `.tmp-<pid>`. Errors of the operating system become a `StorageError` of one sentence.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import unicodedata
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tunesmith.errors import StorageError, TunesmithError

TEMPORARY = re.compile(r"\.tmp-\d+$")
CHECKPOINT = re.compile(r"global_step_(\d+)$")
DONE = "DONE.json"
"""File that makes a folder complete: written last, with the size and the checksum of every other file."""
GIB = 2**30
CHECKSUM_CHUNK_BYTES = 2**24

DENIED = "permission denied; choose a folder that you may write (checkpoint_root_dir of a run)"
REASONS = {
    errno.ENOSPC: "no space is left on the disk; free some, or choose another folder (checkpoint_root_dir of a run)",
    errno.EDQUOT: "the disk quota is used up; free some space, or choose another folder (checkpoint_root_dir of a run)",
    errno.EACCES: DENIED,
    errno.EPERM: DENIED,
    errno.EROFS: "the file system is read-only; choose another folder (checkpoint_root_dir of a run)",
}


class Place:
    """A file or folder that has one name in every run folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: RunPaths, owner: type[RunPaths]) -> Path:
        return paths.root / self._name


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Paths of the files in a run folder."""

    root: Path
    config = Place("config.yaml")
    sources = Place("sources.json")
    """Digests of the rows of each data set, which a resumed run compares."""
    lock = Place("run.lock")
    metrics = Place("metrics.jsonl")
    error = Place("error.json")
    """The error that stopped the run; removed when the run is resumed."""
    tokenizer = Place("tokenizer")
    """The tokenizer of the policy, from before the first step on."""
    notes = Place("notes.json")
    """What a user wrote about the run."""
    monitor = Place("monitor")
    tensorboard = Place("monitor/tensorboard")
    last_commit = Place("last_commit.json")
    """The newest step that had a checkpoint."""
    best = Place("best")
    """Link to the checkpoint with the best evaluation."""
    best_record = Place("best.json")
    """Step and value of the best evaluation."""
    stopped = Place("stopped.json")
    """Why a run ended before its last step."""

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


@contextmanager
def locked(path: Path, root: Path) -> Iterator[None]:
    """Hold the lock file `path`, which stands for `root`; StorageError if another process holds it."""
    with storage_errors(root, "write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = acquire_lock(path, root)
    with lock:
        yield


@contextmanager
def locked_beside(root: Path) -> Iterator[None]:
    """Hold `<root>.lock` while `root`, which appears by one rename, is made; removes what killed writes of it left."""
    path = root.with_name(f"{root.name}.lock")
    with locked(path, root):
        remove_leftovers(root.parent, root.name)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def acquire_lock(path: Path, root: Path) -> BinaryIO:
    """Lock the file `path`, which stands for `root`; the operating system releases it when the process exits."""
    lock = path.open("a+b")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        holder = lock.read().decode(errors="replace").strip() or "unknown"
        lock.close()
        raise StorageError(
            f"{root} is locked by process {holder}: wait for it to exit, or choose another folder"
        ) from error
    except OSError:
        lock.close()
        raise
    if not is_same_file(lock, path):  # the holder removed it and has exited since
        lock.close()
        return acquire_lock(path, root)
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n".encode())
    lock.flush()
    return lock


def is_same_file(file: BinaryIO, path: Path) -> bool:
    """Whether the path still refers to the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def is_locked(path: Path) -> bool:
    """Whether a living process of this machine holds the lock."""
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
    except TunesmithError:  # such as a data set that does not exist, read while a file is written
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


def encode_json_line(value: Any, **options: Any) -> bytes:
    """A value as a line of a JSON Lines file; lone surrogates are escaped. `options` are those of `json.dumps`."""
    return json.dumps(value, ensure_ascii=False, **options).encode(errors="backslashreplace") + b"\n"


def save_link(path: Path, target: str) -> None:
    """Replace `path` atomically by a symbolic link to a neighbor."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with storage_errors(path, "write"):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(path)
        sync_folder(path.parent)


def load_json(path: Path) -> Any:
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
    return [
        parse_json_line(line, path=path, number=number) for number, line in enumerate(lines, start=1) if line.strip()
    ]


def parse_json_line(line: str | bytes, *, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise StorageError(f"cannot read {path}: line {number} is not JSON ({error})") from error


@contextmanager
def renamed_folder(folder: Path) -> Iterator[Path]:
    """A folder under a temporary name, renamed to `folder` when the with-block succeeds and removed when it fails."""
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    with storage_errors(folder, "write"):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            sync_tree(temporary)
            temporary.rename(folder)
            sync_folder(folder.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


@contextmanager
def new_folder(folder: Path, record: Mapping[str, Any]) -> Iterator[Path]:
    """`renamed_folder` with a DONE.json, written last: `record` as it is then, and every file's size and checksum."""
    with renamed_folder(folder) as temporary:
        yield temporary
        sizes = {name: (temporary / name).stat().st_size for name in list_files(temporary)}
        checksums = {name: compute_checksum(temporary / name) for name in sizes}
        save_json(temporary / DONE, {**record, "files": sizes, "crc32": checksums})


def list_files(folder: Path) -> list[str]:
    """Paths of all files in a folder, relative to it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def check_complete(folder: Path) -> None:
    """Refuse a folder damaged by a partial copy or a failing disk; older ones have sizes but no checksums."""
    for name, expected in check_sizes(folder).get("crc32", {}).items():
        found = compute_checksum(folder / name)
        if found != expected:
            raise StorageError(f"{folder / name} is damaged: its CRC-32 is {found} instead of {expected}")


def check_sizes(folder: Path) -> dict[str, Any]:
    """Refuse a checkpoint with missing or truncated files; return the content of its DONE.json."""
    if not (folder / DONE).is_file():
        raise StorageError(f"{folder} is not a complete checkpoint: it has no {DONE}")
    record = load_json(folder / DONE)
    if not isinstance(record, dict) or not isinstance(record.get("files"), dict):
        raise StorageError(f"{folder / DONE} is damaged: it does not list the checkpoint's files")
    for name, num_bytes in record["files"].items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else 0
        if found != num_bytes:
            raise StorageError(f"{path} is damaged: it has {found} bytes instead of {num_bytes}")
    return record


def remove_leftovers(folder: Path, *names: str) -> None:
    """Remove what killed writes left in a folder: all temporary files, or those of these `names`; hold their lock."""
    for path in folder.iterdir():
        found = TEMPORARY.search(path.name)
        if found is not None and (not names or path.name[: found.start()] in names):
            with storage_errors(path, "remove"):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def append_json_lines(path: Path, *rows: Any) -> None:
    """Append rows in one write; they are on disk when it returns. An incomplete last line is removed, and a full disk
    leaves no part of the rows."""
    data = b"".join(map(encode_json_line, rows))
    with storage_errors(path, "write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # what looks incomplete may be a line that another process is writing
            if os.pread(file.fileno(), 1, max(os.fstat(file.fileno()).st_size - 1, 0)) not in (b"", b"\n"):
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
            written = file.write(data)
            if written < len(data):
                os.truncate(path, path.stat().st_size - written)
                raise StorageError(f"cannot write {path}: no space is left on the disk")
            os.fsync(file.fileno())


class Journal:
    """Rows of JSON in a file, one a line: finished parts of work that a kill may interrupt.

    Opening it and appending to it remove an incomplete last line. Of rows that are appended together, a kill may leave
    the first ones, a full disk leaves none. Several processes may append to one file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Any] = []
        """The rows that were in the file when it was opened."""
        if path.exists():
            lines = self._read_lines()
            complete = [line for line in lines if line.endswith(b"\n")]
            self.rows = [parse_json_line(line, path=path, number=number) for number, line in enumerate(complete, 1)]
            if len(complete) < len(lines):
                self.append()

    def append(self, *rows: Any) -> None:
        append_json_lines(self.path, *rows)

    def keep(self, num_rows: int) -> None:
        """Remove all but the first rows."""
        num_bytes = sum(map(len, self._read_lines()[:num_rows]))
        del self.rows[num_rows:]
        if num_bytes < self.path.stat().st_size:
            with storage_errors(self.path, "write"):
                os.truncate(self.path, num_bytes)

    def _read_lines(self) -> list[bytes]:
        with storage_errors(self.path, "read"):
            return self.path.read_bytes().splitlines(keepends=True)


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


def clean_text(text: str) -> str:
    """The text with each lone surrogate, which UTF-8 cannot encode, replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def clean_terminal(text: str) -> str:
    """The text without characters that control a terminal: a model may have written such."""
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) not in {"Cc", "Cf", "Cs"} else "\ufffd" for char in text
    )
