"""Links of README.md and docs/ lead to existing files and headings; paths and knobs that the text names exist."""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from markdown_pages import PAGES, ROOT, find_anchors, iter_inline_code, iter_links

from tunesmith.commands.table import list_config_classes
from tunesmith.runs.load_config import describe_options

NAME = re.compile(r"tunesmith(?:\.[a-z_0-9]+)+(?:[.:]\w+)*")
PATH = re.compile(r"(?:tunesmith|tests|benchmarks|results|recipes|docs|\.ci)/[\w./*{},-]*\w")
KNOB = re.compile(r"[a-z_]+(\.[a-z_0-9]+)+")
SECTIONS = ("model", "algorithm", "trainer", "engine", "rollout", "experience", "evaluation", "monitor")
FOREIGN_KEYS = {"coming_from"}
"""Folders of docs/ whose pages name keys of other frameworks."""


def name_page(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for line, link in iter_links(page):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists():
            broken.append(f"{name_page(page)}:{line}: {link}: no such file")
        elif anchor and path.suffix == ".md" and anchor not in find_anchors(path):
            broken.append(f"{name_page(page)}:{line}: {link}: no such heading")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_paths_in_the_text_exist(page: Path) -> None:
    missing = [
        f"{name_page(page)}:{line}: {match[0]}"
        for line, code in iter_inline_code(page)
        for match in [PATH.fullmatch(code.partition(":")[0])]
        if match is not None and "{" not in match[0] and not list(ROOT.glob(match[0]))
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_names_of_the_package_in_the_text_exist(page: Path) -> None:
    missing = [
        f"{name_page(page)}:{line}: {code}"
        for line, code in iter_inline_code(page)
        if NAME.fullmatch(code) and not exists(code)
    ]
    assert not missing, "\n".join(missing)


def exists(name: str) -> bool:
    """Whether a dotted name is a module of the package, or an attribute of one."""
    parts = name.replace(":", ".").split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part, None)
        return found is not None
    return False


@functools.cache
def list_knobs() -> set[str]:
    """The keys of all commands, and of the sections that they are in."""
    known: set[str] = set()
    for stage in list_config_classes().values():
        for option in describe_options(stage):
            parts = option.key.split(".")
            known |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return known


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name not in FOREIGN_KEYS], ids=name_page)
def test_knobs_in_the_text_exist(page: Path) -> None:
    known = list_knobs()
    unknown = [
        f"{name_page(page)}:{line}: {code}"
        for line, code in iter_inline_code(page)
        for key in [code.partition("=")[0].partition(":")[0].strip()]
        if KNOB.fullmatch(key) and key.split(".")[0] in SECTIONS and not is_known(key, known)
    ]
    assert not unknown, "\n".join(unknown)


def is_known(key: str, known: set[str]) -> bool:
    """Whether the key, or a mapping that holds it, is a knob."""
    attributes = {"model.client", "model.model_name", "model.api_key", "model.base_url", "model.options"}
    parts = key.split(".")
    inside = any(".".join(parts[:length]).endswith("_args") for length in range(1, len(parts)))
    return key in known or key in attributes or inside or parts[-1] in ("py", "json", "yaml", "safetensors")
