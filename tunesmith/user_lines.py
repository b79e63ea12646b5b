"""Lines of user code: where it failed, where it waits, where it blocks, where a thread still runs.

The line is the innermost one in a file that is neither Python's, nor an installed package's, nor ours; else the
innermost one of an installed package.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

Line = tuple[CodeType, int]
"""A function's code and the number of the line in its file."""

PACKAGE = f"{Path(__file__).resolve().parent}/"
PYTHON = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
INSTALLED = tuple(f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib"))
TYPED_IN = ("<stdin>", "<ipython")


def find_error_line(error: BaseException) -> str | None:
    """The line of user code that raised, or that called what raised."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return find_user_line((frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__))


def find_running_line(frame: FrameType) -> str | None:
    """The line of user code that a thread is at, given its innermost frame."""
    stack = list(traceback.walk_stack(frame))
    return find_user_line((each.f_code, line) for each, line in reversed(stack))


def find_calling_line() -> str | None:
    """The line of user code that called us."""
    return find_running_line(sys._getframe(1))


def find_waiting_line(coroutine: Any) -> str | None:
    """The line of user code at which a suspended coroutine, or what it awaits, waits."""
    lines: list[Line] = []
    while coroutine is not None:
        for kind in ("cr", "gi", "ag"):
            frame = getattr(coroutine, f"{kind}_frame", None)
            if frame is not None:
                lines.append((frame.f_code, frame.f_lineno))
                break
        coroutine = next(
            (getattr(coroutine, name) for name in ("cr_await", "gi_yieldfrom", "ag_await") if hasattr(coroutine, name)),
            None,
        )
    return find_user_line(lines)


def find_definition_line(function: Callable[..., Any]) -> str | None:
    """Where a function begins; None for what is not written in Python."""
    code = getattr(getattr(function, "func", function), "__code__", None)
    return None if code is None else format_line((code, code.co_firstlineno))


def find_user_line(lines: Iterable[Line]) -> str | None:
    """The line of user code among those of a stack, outermost first; None where there is none."""
    found: Line | None = None
    has_own = False
    for line in lines:
        path = line[0].co_filename
        is_own = is_user_path(path)
        if is_own or (not has_own and path.startswith(INSTALLED)):
            found, has_own = line, has_own or is_own
    return None if found is None else format_line(found)


def is_user_path(path: str) -> bool:
    """Whether a file is neither Python's, nor an installed package's, nor ours."""
    if path.startswith("<"):
        return path.startswith(TYPED_IN)
    return not path.startswith((PACKAGE, *PYTHON, *INSTALLED))


def format_line(line: Line) -> str:
    """`agent.py:12 in solve`; files below the current folder are named from there."""
    code, number = line
    path = Path(code.co_filename)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{number} in {code.co_name}"
