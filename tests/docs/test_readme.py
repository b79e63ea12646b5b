"""Every block of README.md, and the notebook of the first agent, run as printed in the environment of the install line.

Only numbers are smaller, through the variable TUNESMITH_SET, and models: tiny ones stand in the hub's cache under the
name that README.md uses, and in a wheel under the name of the one with SmolLM2.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_pages import ROOT, Snippet, find_snippets
from readme_environment import make_environment, write_wheel
from shell_commands import iter_commands
from test_snippets import find_language

from forked_programs import LOG, ForkedPrograms
from gguf_files import write_tiny_gguf
from small_pocket import write_small_pocket
from tunesmith.model.prepare import SMOLLM2_FILE, SMOLLM2_PACKAGE

for package in ("agentscope", "gguf"):
    pytest.importorskip(package)

SNIPPETS = find_snippets(ROOT / "README.md")
NOTEBOOK = ROOT / "recipes" / "first_agent" / "first_agent.ipynb"
HUB_MODEL = "Qwen/Qwen2.5-7B-Instruct"
FOREIGN = ("hypothesis", "trl", "bm25s", "mkdocs")
"""Packages of developers, and of an extra that the install line does not name."""


def find_commands(snippet: Snippet) -> list[list[str]]:
    """The commands of a block, as words."""
    return [shlex.split(line) for line in iter_commands(snippet.text)] if find_language(snippet) == "bash" else []


def save_in_cache(name: str, cache: Path) -> None:
    """A tiny model in the hub's cache."""
    folder = cache / "hub" / f"models--{name.replace('/', '--')}"
    revision = "0" * 40
    write_small_pocket(folder / "snapshots" / revision, is_for_gguf=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedPrograms]:
    """Runs programs in the environment of the install line, which is the first command."""
    place = tmp_path_factory.mktemp("reader")
    first, *_ = (line for snippet in SNIPPETS for line in iter_commands(snippet.text))
    python = make_environment(place / "environment", first)
    save_in_cache(HUB_MODEL, place / "cache")
    write_tiny_gguf("smollm", place / SMOLLM2_FILE)
    write_wheel(place, SMOLLM2_PACKAGE, "0.1.2", {f"{SMOLLM2_PACKAGE}/{SMOLLM2_FILE}": place / SMOLLM2_FILE})
    own = {"HF_HOME": str(place / "cache"), "PYTHONPATH": str(ROOT), "PIP_FIND_LINKS": str(place), "PIP_NO_INDEX": "1"}
    programs = ForkedPrograms(str(python), own)
    yield programs
    programs.close()


def test_only_the_overview_is_not_run():
    not_run = [each for each in SNIPPETS if not each.is_run and "file" not in each.directives]
    assert [each.directives for each in not_run] == [{"not run": "an overview; each command is run by its own tests"}]


def test_packages_that_the_install_line_does_not_bring_cannot_be_imported(reader, tmp_path):
    program = (
        f"import importlib.util as util\nassert not any(map(util.find_spec, {FOREIGN}))\nimport agentscope, gguf\n"
    )
    (tmp_path / "program.py").write_text(program)
    assert reader.run(["python", "program.py"], folder=tmp_path) == 0, (tmp_path / LOG).read_text()


def test_every_block_runs_as_it_is_printed(reader, tmp_path):
    for snippet in SNIPPETS:
        if "file" in snippet.directives:
            (tmp_path / snippet.directives["file"]).write_text(snippet.text)
        if not snippet.is_run:
            continue
        for words in find_commands(snippet):
            if words[:3] == ["pip", "install", "-e"]:
                continue  # its environment is the one that everything runs in
            variables = {"TUNESMITH_SET": snippet.directives.get("run set", "")}
            status = reader.run(words, folder=tmp_path, environment=variables)
            log = (tmp_path / LOG).read_text(encoding="utf-8", errors="replace")
            assert status == 0, f"{snippet.place}: {words} ended with {status}:\n{log[-8000:]}"
    assert list((tmp_path / "export" / "json-7b").rglob("*.gguf"))


CELLS = """
import ast, asyncio, inspect, json

async def main():  # as in Jupyter, an event loop runs, and cells may await
    names = {"__name__": "__main__"}
    for number, text in json.load(open("cells.json")).items():
        code = compile(text, f"cell {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if inspect.isawaitable(value := eval(code, names)):
            await value

asyncio.run(main())
"""


def test_the_notebook_runs_from_top_to_bottom(reader, tmp_path):
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    cells = {each["id"]: "".join(each["source"]) for each in notebook["cells"] if each["cell_type"] == "code"}
    assert len(cells) > 5 and not any(each.get("outputs") for each in notebook["cells"])
    shell = [number for number, text in cells.items() if text.startswith("!")]
    commands = [shlex.split(line.removeprefix("!")) for number in shell for line in cells.pop(number).splitlines()]
    (tmp_path / "cells.json").write_text(json.dumps(cells))
    (tmp_path / "cells.py").write_text(CELLS)
    small = re.search(r'TUNESMITH_SET="(.*?)" jupyter', NOTEBOOK.read_text().replace('\\"', '"'))[1]
    for words in (*commands, ["python", "cells.py"]):
        status = reader.run(words, folder=tmp_path, environment={"TUNESMITH_SET": small})
        assert status == 0, f"{words} ended with {status}:\n{(tmp_path / LOG).read_text()[-8000:]}"
