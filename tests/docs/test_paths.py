"""Paths and commands of benchmarks, results, tests and recipes that pages and source files name exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from markdown_pages import PAGES, ROOT
from shell_commands import find_errors

FOLDERS = "benchmarks|results|tests|recipes"
NAMED = re.compile(rf"(?<![\w/.$}}-])(?:{FOLDERS})/[\w./*{{}},+-]*[\w*}}]")
WRITTEN = re.compile(r"--out(?:-dir)?[ =]\S+")
"""The file or folder that a command creates."""
SOURCES = [
    *(ROOT / name for name in ("pyproject.toml", "mkdocs.yml", "Makefile", ".ci/run", ".ci/check_wheel")),
    *(path for folder in ("tunesmith", "benchmarks", "tests", "recipes") for path in (ROOT / folder).rglob("*.*")),
]
SOURCE_SUFFIXES = {".py", ".md", ".yaml", ".toml", ".yml", ""}
FILE_SUFFIXES = (".py", ".md", ".sh", ".yaml", ".json", ".jsonl", ".txt")
SCRIPTS = [path for path in sorted((ROOT / "benchmarks").glob("*/*.py")) if "\nif __name__ ==" in path.read_text()]


def name_file(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def find_missing(text: str) -> Iterator[str]:
    """Named paths that do not exist, with the number of the line that names them."""
    for number, line in enumerate(text.split("\n"), start=1):
        for match in NAMED.finditer(WRITTEN.sub("", line)):
            if not all(map(exists, expand_braces(match[0]))):
                yield f"{number}: {match[0]}"


def expand_braces(text: str) -> list[str]:
    """`a{b,c}` as `ab` and `ac`."""
    match = re.search(r"\{([^{}]*)\}", text)
    if match is None:
        return [text]
    before, after = text[: match.start()], text[match.end() :]
    return [each for part in match[1].split(",") for each in expand_braces(before + part + after)]


@cache
def exists(pattern: str) -> bool:
    return next(ROOT.glob(pattern), None) is not None


@pytest.mark.parametrize("page", PAGES, ids=name_file)
def test_paths_that_a_page_names_exist(page: Path) -> None:
    missing = list(find_missing(page.read_text(encoding="utf-8")))
    assert not missing, "\n".join(missing)


def test_files_that_sources_name_exist() -> None:
    """Names with an ending; what a benchmark writes may have another name than the results that are kept."""
    files = [path for path in SOURCES if path.is_file() and path.suffix in SOURCE_SUFFIXES]
    missing = [
        f"{name_file(path)}:{each}"
        for path in files
        for each in find_missing(path.read_text(encoding="utf-8"))
        if each.endswith(FILE_SUFFIXES) and not ("benchmarks" in path.parts and ": results/" in each)
    ]
    assert len(files) > 1000 and not missing, "\n".join(missing)


def test_a_missing_path_is_found() -> None:
    text = "tests/docs and\n`results/engine/no_such`, tests/{docs,no_such}, benchmarks/engine; x --out results/mine\n"
    assert list(find_missing(text)) == ["2: results/engine/no_such", "2: tests/{docs,no_such}"]


@pytest.mark.parametrize("script", SCRIPTS, ids=name_file)
def test_commands_in_the_docstring_of_a_benchmark_exist(script: Path) -> None:
    docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    lines = docstring.replace("\\\n", " ").split("\n")
    commands = [match[1] for line in lines if (match := re.match(r" *(?:taskset -c \S+ )?(python .*)", line))]
    errors = find_errors("\n".join(commands))
    assert not errors, "\n".join(errors)


def test_every_benchmark_is_in_the_table() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    started_by_others = {"benchmarks.endpoint.load"}
    modules = {name_file(script).removesuffix(".py").replace("/", ".") for script in SCRIPTS} - started_by_others
    listed = set(re.findall(r"`python -m (benchmarks\.[\w.]+)", page))
    assert modules == listed
