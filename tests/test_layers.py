"""Packages import lower layers only, never a sibling, and have no circular imports; deferred imports count too."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tunesmith"
LAYERS = [
    {
        "types",
        "config",
        "errors",
        "garbage",
        "storage",
        "arguments",
        "version",
        "metric",
        "hub",
        "user_lines",
        "tool_log",
        "http_server",
        "data_juicer",
        "json_rpc",
    },
    {"algorithms", "cluster", "tasks", "experience", "chat", "grammar", "model", "monitor"},
    {"retrieval"},
    {"engine", "trainer", "rollout", "judges", "tools"},
    {"environments"},
    {"loop"},
    {"runs"},
    {"compat"},
    {"commands"},
    {"et_agent", "viewer"},
    {"api", "cli", "pipeline", "compat.agentscope", "__init__", "__main__"},
]
RAISED = "tunesmith.compat.agentscope"
"""The sub-package on a higher layer than the rest of its package: AgentScope's names of the public API."""
INNER_LAYERS = {
    "retrieval": [{"settings"}, {"corpus"}, {"index"}, {"server"}],
    "engine": [{"event_loop", "core"}, {"batch"}, {"cuda", "cpu"}, {"worker"}, {"engine"}, {"vllm"}],
    "commands": [
        {"table", "references"},
        {"settings", "stage"},
        {"eval"},
        {"sft", "export", "doctor", "candidates", "pass_rate"},
        {"tune", "prepare", "check", "collect", "select_model", "tune_prompt"},
        {"serve", "run", "environments"},
        {"demo"},
    ],
    "et_agent": [{"formats", "selection", "radar"}, {"flywheel"}],
    "viewer": [{"reading", "bundle"}, {"answers"}, {"server", "export"}, {"command"}],
}
"""Layers of sub-packages; other packages are only checked for circular imports."""
NEIGHBOURS = {"tunesmith.et_agent", "tunesmith.retrieval", "tunesmith.viewer", "tunesmith.compat"}
TORCH_FREE = LAYERS[0] | {"tasks", "experience", "monitor", "retrieval", "viewer"}


def name_module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_module(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def iter_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and imported modules; `from package import module` imports the module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield node.lineno, whole if whole in FILES else str(node.module)


@functools.cache
def list_imports() -> dict[str, list[tuple[int, str]]]:
    """The imports of every module."""
    return {name: list(iter_imports(path)) for name, path in FILES.items()}


def find_child(module: str, package: str) -> str:
    """The file or sub-package of `package` that contains the module; `__init__` for the package itself."""
    if package == "tunesmith" and (module == RAISED or module.startswith(f"{RAISED}.")):
        return RAISED.removeprefix("tunesmith.")
    return "__init__" if module == package else module.removeprefix(f"{package}.").split(".")[0]


def iter_internal_imports(package: str) -> Iterator[tuple[str, str, str]]:
    """Imports between children of a package: importer, imported child, and location."""
    for module, imports in list_imports().items():
        if module != package and not module.startswith(f"{package}."):
            continue
        for line, target in imports:
            if target == package or target.startswith(f"{package}."):
                source, sink = find_child(module, package), find_child(target, package)
                if source != sink:
                    yield source, sink, f"{module}:{line} imports {target}"


def list_upward_imports(package: str, layers: list[set[str]], *, is_free: set[str] = frozenset()) -> list[str]:
    depth_of = {child: depth for depth, children in enumerate(layers) for child in children}
    return [
        where
        for source, sink, where in iter_internal_imports(package)
        if source != "__init__" and source not in is_free and depth_of[sink] >= depth_of[source]
    ]


def find_cycle(package: str) -> list[str]:
    """The imports of one cycle between children of a package, or an empty list."""
    arrows: dict[str, dict[str, str]] = {}
    for source, sink, where in iter_internal_imports(package):
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
    wrong = list_upward_imports("tunesmith", LAYERS, is_free=LAYERS[0] | LAYERS[-1])
    wrong += [
        where
        for source, sink, where in iter_internal_imports("tunesmith")
        if source in LAYERS[0] and sink not in LAYERS[0]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", list(INNER_LAYERS))
def test_sub_packages_import_only_lower_layers(package):
    wrong = list_upward_imports(f"tunesmith.{package}", INNER_LAYERS[package])
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", [name for name, path in FILES.items() if path.name == "__init__.py"])
def test_no_package_has_circular_imports(package):
    cycle = find_cycle(package)
    assert not cycle, "\n".join(cycle)


def list_public_modules() -> set[str]:
    """The modules that docs/architecture.md lists as public to neighbours."""
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    table = page[page.index("| public to neighbours |") :].partition("\n\n")[0]
    return {name for line in table.splitlines()[2:] for name in re.findall(r"`([\w.]+)`", line.split("|")[1])}


def test_neighbours_import_public_modules_only():
    public = list_public_modules()
    assert public and all(name == "tunesmith" or name in FILES for name in public)
    wrong = [
        f"{module}:{line} imports {name}"
        for module, imports in list_imports().items()
        if (owner := ".".join(module.split(".")[:2])) in NEIGHBOURS
        for line, name in imports
        if name.split(".")[0] == "tunesmith" and not is_inside(name, owner)
        if name != "tunesmith" and not any(is_inside(name, each) for each in public - {"tunesmith"})
    ]
    assert not wrong, "\n".join(wrong)


def is_inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def test_light_packages_never_import_torch():
    wrong = [
        f"{module}:{line}"
        for module, imports in list_imports().items()
        if find_child(module, "tunesmith") in TORCH_FREE
        for line, name in imports
        if name.split(".")[0] in {"torch", "transformers"}
    ]
    assert not wrong, "\n".join(wrong)
