"""A room imports only rooms on lower layers, never a sibling; deferred imports are checked too."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "tunesmith"
LAYERS = [
    {"types", "config", "errors", "storage", "arguments", "version", "metric", "hub"},
    {"algorithms", "tasks", "experience", "model", "retrieval", "monitor", "report"},
    {"engine", "trainer", "rollout", "judges", "tools"},
    {"loop"},
    {"pipeline", "compat"},
    {"api", "cli", "run_files", "__init__", "__main__"},
]
LAYER_OF = {room: depth for depth, rooms in enumerate(LAYERS) for room in rooms}
TORCH_FREE = {
    "types", "config", "errors", "storage", "arguments", "metric", "hub", "tasks", "experience", "monitor", "report"
}  # fmt: skip


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def iter_imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.lineno, node.module
            if node.module == "tunesmith":
                for alias in node.names:
                    yield node.lineno, f"tunesmith.{alias.name}"


def test_every_room_has_a_layer():
    assert {room_of(path) for path in PACKAGE.rglob("*.py")} <= set(LAYER_OF)


def test_rooms_import_only_lower_layers():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = room_of(path)
        for line, name in iter_imports(path):
            parts = name.split(".")
            if parts[0] != "tunesmith" or len(parts) == 1 or parts[1] == room:
                continue
            target = parts[1]
            is_top = LAYER_OF[room] == len(LAYERS) - 1
            is_foundation = LAYER_OF[room] == LAYER_OF.get(target) == 0
            if target in LAYER_OF and not is_top and not is_foundation and LAYER_OF[target] >= LAYER_OF[room]:
                wrong.append(f"{path.relative_to(PACKAGE)}:{line} {room} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_light_rooms_never_import_torch():
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if room_of(path) in TORCH_FREE
        for line, name in iter_imports(path)
        if name.split(".")[0] in {"torch", "transformers"}
    ]
    assert not wrong, "\n".join(wrong)


def test_files_and_functions_stay_short():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if text.count("\n") > 400:
            wrong.append(f"{path.relative_to(PACKAGE)}: {text.count(chr(10))} lines, at most 400")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > 60:
                    wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}: {length} lines, at most 60")
    assert not wrong, "\n".join(wrong)
