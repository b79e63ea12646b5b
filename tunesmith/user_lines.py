"""Finds the line of user code in a stack: where it raised, awaits, blocks, or where a thread still runs.

User code is any file outside the standard library, site-packages and this package. The result is the innermost such
line, else the innermost line of an installed package.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from itertools import takewhile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

Line = tuple[CodeType, int]
"""A function's code object and a line number."""

PACKAGE = f"{Path(__file__).resolve().parent}/"
STANDARD_LIBRARY = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
INSTALLED = tuple(f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib"))
INTERACTIVE = ("<stdin>", "<ipython")


def find_error_line(error: BaseException) -> str | None:
    """The line of user code that raised, or that called the code that raised."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return find_user_line((frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__))


def describe_raised(name: str, error: BaseException) -> str:
    """What the code of that name raised, with the line of `find_error_line`."""
    line = find_error_line(error)
    return f"{name} raised {type(error).__name__}: {error}" + ("" if line is None else f" ({line})")


def find_running_line(frame: FrameType, *, within: CodeType | None = None) -> str | None:
    """The line of user code that a thread executes; `frame` is its innermost frame. Callers of `within` are left
    out."""
    stack = takewhile(lambda each: each[0].f_code is not within, traceback.walk_stack(frame))
    return find_user_line((each.f_code, line) for each, line in reversed(list(stack)))


def find_calling_line() -> str | None:
    """The line of user code that called this package."""
    return find_running_line(sys._getframe(1))


def find_waiting_line(coroutine: Any) -> str | None:
    """The line of user code at which a coroutine is suspended, following the chain of awaited objects."""
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
    """The first line of a function; None if it is not written in Python, or is part of this package."""
    code = getattr(getattr(function, "func", function), "__code__", None)
    return None if code is None or code.co_filename.startswith(PACKAGE) else format_line((code, code.co_firstlineno))


def find_user_line(lines: Iterable[Line]) -> str | None:
    """The line of user code in a stack (outermost first), or None."""
    found: Line | None = None
    has_user_line = False
    for line in lines:
        path = line[0].co_filename
        is_user = is_user_path(path)
        if is_user or (not has_user_line and path.startswith(INSTALLED)):
            found, has_user_line = line, has_user_line or is_user
    return None if found is None else format_line(found)


def is_user_path(path: str) -> bool:
    """Whether a file is outside the standard library, site-packages and this package."""
    if path.startswith("<"):
        return path.startswith(INTERACTIVE)
    return not path.startswith((PACKAGE, *STANDARD_LIBRARY, *INSTALLED))


def format_line(line: Line) -> str:
    """`agent.py:12 in solve`; paths below the working directory are relative to it."""
    code, number = line
    path = Path(code.co_filename)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{number} in {code.co_name}"
