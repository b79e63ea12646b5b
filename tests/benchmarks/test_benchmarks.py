"""What benchmarks import exists: they run seldom, so a renamed function would go unnoticed."""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "benchmarks").glob("*/*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_imports_of_a_benchmark_exist(script: Path) -> None:
    missing = [
        f"{script.name}:{node.lineno}: {node.module}.{alias.name}"
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
        if (path := find_source(node.module)) is not None and alias.name not in list_names(path)
    ]
    assert not missing, "\n".join(missing)


def test_a_missing_name_is_found() -> None:
    assert "no_such_function" not in list_names(ROOT / "benchmarks" / "shared" / "shapes.py")
    assert {"SHAPES", "count_parameters"} <= list_names(ROOT / "benchmarks" / "shared" / "shapes.py")


@functools.cache
def find_source(module: str) -> Path | None:
    """The file of a module of this repository; None for those of libraries."""
    if module.split(".")[0] not in ("benchmarks", "tunesmith"):
        return None
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"there is no module {module}"
    return Path(spec.origin)


@functools.cache
def list_names(path: Path) -> set[str]:
    """Names that a module defines, imports or lists in `__all__`, and its submodules."""
    names = {each.stem for each in path.parent.iterdir()} if path.name == "__init__.py" else set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.ImportFrom() | ast.Import():
                names |= {alias.asname or alias.name for alias in node.names}
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Constant(value=str(text)):  # of `__all__`
                names.add(text)
    return names
