"""Execution of one piece of code as in a notebook: the value of a last bare expression is printed.

Errors are printed to standard error with the lines of the code. The namespace is that of a module `__main__`, fresh
for a stateless call and kept in a session.
"""

from __future__ import annotations

import ast
import linecache
import sys
import traceback
import types
from typing import Any

OK, ERROR, MEMORY, CPU_TIME = b"0", b"1", b"m", b"c"


class CpuTimeError(BaseException):
    """The code of a session has used its CPU time."""


def build_module() -> types.ModuleType:
    """The module that code runs in; it takes the place of `__main__`, so that classes in it can be pickled."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    return module


def run_snippet(source: bytes, module: types.ModuleType, *, filename: str) -> bytes:
    """Run code; return `OK`, or one of the other statuses for an uncaught exception."""
    try:
        code = source.decode("utf-8", "surrogatepass")
        linecache.cache[filename] = (len(code), None, [f"{line}\n" for line in code.splitlines()], filename)
        _run(ast.parse(code, filename), module.__dict__, filename)
    except SystemExit as error:
        if error.code is None or error.code == 0:
            return OK
        print(f"SystemExit: {error.code}", file=sys.stderr)
        return ERROR
    except MemoryError as error:
        _print_error(error, filename)
        return MEMORY
    except CpuTimeError as error:
        _print_error(error, filename)
        return CPU_TIME
    except BaseException as error:  # noqa: BLE001 - whatever code raises is printed for the model
        _print_error(error, filename)
        return ERROR
    return OK


def _run(tree: ast.Module, namespace: dict[str, Any], filename: str) -> None:
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, filename, "exec"), namespace)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), filename, "eval"), namespace)
        if value is not None:
            print(value)


def _print_error(error: BaseException, filename: str) -> None:
    """Print the traceback from the first frame of the code on; at the memory limit, only the name of the error."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != filename:
        frames = frames.tb_next
    try:
        traceback.print_exception(type(error), error, frames)
    except BaseException:  # noqa: BLE001 - also a `__str__` of the code that raises
        print(type(error).__name__, file=sys.stderr)
