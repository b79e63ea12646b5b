"""Packages import lower layers only, never a sibling and never in a circle; deferred imports count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tunesmith"
LAYERS = [
    {"types", "config", "errors", "storage", "arguments", "version", "metric", "hub", "user_lines"},
    {"algorithms", "tasks", "experience", "chat", "model", "monitor"},
    {"engine", "trainer", "rollout", "judges", "tools"},
    {"loop"},
    {"pipeline", "compat"},
    {"api", "cli", "run_files", "__init__", "__main__"},
]
INNER_LAYERS = {
    "engine": [{"event_loop", "core"}, {"batch"}, {"cuda", "cpu"}, {"worker"}, {"engine"}],
    "pipeline": [{"session"}, {"data"}, {"eval"}, {"rl", "sft", "prepare", "export"}, {"stages", "demo", "math_agent"}],
}
"""Of packages whose sub-packages are layered; in every other package the check for circles is enough."""
TORCH_FREE = LAYERS[0] | {"tasks", "experience", "monitor"}
MAX_FILES = 15


def name_module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_module(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def iter_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and the modules that they import; `from package import module` is an import of the module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield node.lineno, whole if whole in FILES else str(node.module)


IMPORTS = {name: list(iter_imports(path)) for name, path in FILES.items()}


def find_child(module: str, package: str) -> str:
    """The file or sub-package of a package that a module is in; `__init__` for the package's own file."""
    return "__init__" if module == package else module.removeprefix(f"{package}.").split(".")[0]


def list_arrows(package: str) -> Iterator[tuple[str, str, str]]:
    """Imports between children of a package: importer, imported, and where."""
    for module, imports in IMPORTS.items():
        if module != package and not module.startswith(f"{package}."):
            continue
        for line, target in imports:
            if target == package or target.startswith(f"{package}."):
                source, sink = find_child(module, package), find_child(target, package)
                if source != sink:
                    yield source, sink, f"{module}:{line} imports {target}"


def list_upward(package: str, layers: list[set[str]], *, is_free: set[str] = frozenset()) -> list[str]:
    depth_of = {child: depth for depth, children in enumerate(layers) for child in children}
    return [
        where
        for source, sink, where in list_arrows(package)
        if source != "__init__" and source not in is_free and depth_of[sink] >= depth_of[source]
    ]


def find_circle(package: str) -> list[str]:
    """The imports of one circle between children of a package, or nothing."""
    arrows: dict[str, dict[str, str]] = {}
    for source, sink, where in list_arrows(package):
        arrows.setdefault(source, {}).setdefault(sink, where)
    done: set[str] = set()

    def visit(child: str, path: list[str]) -> list[str]:
        if child in path:
            circle = [*path[path.index(child) :], child]
            return [arrows[one][other] for one, other in pairwise(circle)]
        if child in done:
            return []
        for sink in arrows.get(child, {}):
            if found := visit(sink, [*path, child]):
                return found
        done.add(child)
        return []

    return next((found for child in arrows if (found := visit(child, []))), [])


def test_every_package_has_a_layer():
    assert {find_child(module, "tunesmith") for module in FILES} <= set().union(*LAYERS)
    for package, layers in INNER_LAYERS.items():
        children = {find_child(module, f"tunesmith.{package}") for module in FILES if f"tunesmith.{package}." in module}
        assert children == set().union(*layers), package


def test_packages_import_only_lower_layers():
    wrong = list_upward("tunesmith", LAYERS, is_free=LAYERS[0] | LAYERS[-1])
    wrong += [
        where for source, sink, where in list_arrows("tunesmith") if source in LAYERS[0] and sink not in LAYERS[0]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", list(INNER_LAYERS))
def test_sub_packages_import_only_lower_layers(package):
    wrong = list_upward(f"tunesmith.{package}", INNER_LAYERS[package])
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", [name for name, path in FILES.items() if path.name == "__init__.py"])
def test_no_package_has_a_circle(package):
    circle = find_circle(package)
    assert not circle, "\n".join(circle)


def test_light_packages_never_import_torch():
    wrong = [
        f"{module}:{line}"
        for module, imports in IMPORTS.items()
        if find_child(module, "tunesmith") in TORCH_FREE
        for line, name in imports
        if name.split(".")[0] in {"torch", "transformers"}
    ]
    assert not wrong, "\n".join(wrong)


def test_files_functions_and_folders_stay_small():
    wrong = []
    for path in FILES.values():
        text = path.read_text()
        if text.count("\n") > 400:
            wrong.append(f"{path.relative_to(PACKAGE)}: {text.count(chr(10))} lines, at most 400")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > 60:
                    wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}: {length} lines, at most 60")
    for folder in {path.parent for path in FILES.values()}:
        num_files = sum(path.name != "__init__.py" for path in folder.glob("*.py"))
        if num_files > MAX_FILES:
            wrong.append(f"{folder.relative_to(PACKAGE)}/: {num_files} modules, at most {MAX_FILES}")
    assert not wrong, "\n".join(wrong)
