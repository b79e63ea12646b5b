"""The temporary folder of a sandbox: how full it is, and its removal.

The pool looks after it: names and sizes of one call's files must not pass through the worker, whose memory the next
call inherits. Code may leave folders that are closed, or nested deeper than a path is long. Both are removed step by
step from the top: a folder is opened, its folders are moved up, and its files are deleted. No symbolic link is
followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from itertools import count

MIB = 1 << 20
MAX_FILES = 10_000
"""Files and folders in a temporary folder."""
MAX_REMOVED_FILES = 1000
"""A worker whose temporary folder holds more is replaced: that takes less time than to remove them."""
KEPT_ATTRIBUTES = ("st_mode", "st_uid", "st_gid", "st_nlink", "st_size")


class SandboxFolder:
    """The temporary folder of a worker that runs."""

    def __init__(self, path: str, *, max_mb: int | None) -> None:
        self._path = path
        self._max_mb = max_mb
        """None where a file system of its own limits the size."""
        self._first = os.stat(path)  # noqa: PTH116

    def is_full(self) -> bool:
        if self._max_mb is None:
            found = os.statvfs(self._path)
            return found.f_files - found.f_ffree > MAX_FILES
        return measure_folder(self._path, max_bytes=self._max_mb * MIB, max_files=MAX_FILES)

    def restore(self) -> bool:
        """Remove the contents and reset the folder itself; False if it is not as it was at first."""
        return empty_folder(self._path, max_files=MAX_REMOVED_FILES) and reset_folder(self._path, self._first)


def measure_folder(path: str, *, max_bytes: int, max_files: int) -> bool:
    """Whether a folder is full; what vanishes meanwhile does not count.

    A folder that cannot be looked into is full: one that is closed, or nested deeper than a path is long, could hold
    anything.
    """
    size = num_files = 0
    left = [path]
    while left:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    num_files += 1
                    with contextlib.suppress(FileNotFoundError):
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
                    if size > max_bytes or num_files > max_files:
                        return True
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):  # these are not the code's: it is measured next time
                return True
    return False


def empty_folder(path: str, *, max_files: int | None = None) -> bool:
    """Remove the contents; False if there are more than `max_files` or something cannot be removed."""
    numbers = count()
    try:
        while entries := list(_scan(path, max_files)):
            for entry in entries:
                if max_files is not None and next(numbers) >= max_files:
                    return False
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)  # noqa: PTH108
                    continue
                os.chmod(entry.path, 0o700)  # noqa: PTH101
                for inner in list(_scan(entry.path, max_files)):
                    if inner.is_dir(follow_symlinks=False):
                        os.chmod(inner.path, 0o700)  # noqa: PTH101
                        os.rename(inner.path, f"{path}/.removed-{next(numbers)}-{inner.inode()}")  # noqa: PTH104
                    else:
                        next(numbers)
                        os.unlink(inner.path)  # noqa: PTH108
                if not os.listdir(entry.path):  # noqa: PTH208
                    os.rmdir(entry.path)  # noqa: PTH106
    except OSError:
        return False
    return True


def reset_folder(path: str, first: os.stat_result) -> bool:
    """Undo changes of the empty folder itself; False if it is not as it was at first."""
    try:
        if hasattr(os, "listxattr"):
            for name in os.listxattr(path):
                if not name.startswith(("security.", "trusted.")):  # of the system
                    os.removexattr(path, name)
        os.chmod(path, stat.S_IMODE(first.st_mode))  # noqa: PTH101
        os.utime(path, (0, 0))
        now = os.stat(path)  # noqa: PTH116
    except OSError:
        return False
    # The folder of a disk stays as large as its list of files has been.
    return all(getattr(now, name) == getattr(first, name) for name in KEPT_ATTRIBUTES)


def remove_folder(path: str) -> None:
    """Remove the folder of a worker that has ended; what cannot be removed stays."""
    empty_folder(f"{path}/tmp")
    shutil.rmtree(path, ignore_errors=True)


def _scan(path: str, limit: int | None) -> Iterator[os.DirEntry[str]]:
    """At most `limit + 1` entries."""
    with os.scandir(path) as entries:
        for number, entry in enumerate(entries):
            if limit is not None and number > limit:
                return
            yield entry
