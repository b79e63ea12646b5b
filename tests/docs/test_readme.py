"""Every block of README.md runs as it is printed, in the environment that its install line makes.

Only numbers are smaller, through the variable TUNESMITH_SET, and models: tiny ones stand in the hub's cache under the
name that README.md uses, and in a wheel under the name of the one with SmolLM2.
"""

from __future__ import annotations

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
