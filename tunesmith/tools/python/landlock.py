"""Landlock rules: which files a process may read, and the one folder that it may change.

Landlock needs no privileges and no namespace, Linux 5.13 or newer. It does not hide names and metadata of files.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
RETURN_ABI_VERSION = 1
PATH_BENEATH = 1
READ_FILE, READ_DIR = 0b0100, 0b1000
FILE_RIGHTS = 0b1100_0000_0000_0111
"""Rights that a rule on a file, not a folder, may have: execute, write, read, truncate, ioctl."""
NUM_RIGHTS_OF_ABI = (0, 13, 14, 15, 15, 16)


def build_ruleset(libc: Any, *, readable: Sequence[str], writable: Sequence[str]) -> int:
    """File descriptor of a ruleset; paths that do not exist are left out."""
    abi = libc.syscall(CREATE_RULESET, None, 0, RETURN_ABI_VERSION)
    if abi < 1:
        raise OSError("Landlock is not available: it needs Linux 5.13 or newer with CONFIG_SECURITY_LANDLOCK")
    rights = (1 << NUM_RIGHTS_OF_ABI[min(abi, len(NUM_RIGHTS_OF_ABI) - 1)]) - 1
    handled = ctypes.c_uint64(rights)
    ruleset = check(libc.syscall(CREATE_RULESET, ctypes.byref(handled), 8, 0), "landlock_create_ruleset")
    rules = [(path, READ_FILE | READ_DIR) for path in readable] + [(path, rights) for path in writable]
    for path, allowed in rules:
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, getattr(os, "O_PATH", 0) | os.O_CLOEXEC)
            limited = allowed & rights if Path(path).is_dir() else allowed & rights & FILE_RIGHTS
            rule = limited.to_bytes(8, sys.byteorder) + fd.to_bytes(4, sys.byteorder)
            check(libc.syscall(ADD_RULE, ruleset, PATH_BENEATH, rule, 0), f"landlock_add_rule for {path}")
            os.close(fd)
    return ruleset


def restrict_self(libc: Any, ruleset: int) -> None:
    """Apply the ruleset to this process for good; needs `no_new_privs`."""
    check(libc.syscall(RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")


def check(result: int, name: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result
