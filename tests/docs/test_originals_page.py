"""The page of the originals' programs: its commands, files and tests exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tunesmith.commands.table import COMMANDS, STAGES
from tunesmith.experience.table import OPERATORS

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "coming_from" / "originals.md"
ROWS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if (line.startswith("| ") and "::" in line) or "`tests/" in line
]
CODE = re.compile(r"`([^`]+)`")
NAMES = {each.name for each in COMMANDS}


def test_every_system_has_rows():
    assert len(ROWS) >= 30
    assert PAGE.read_text(encoding="utf-8").count("| original | here |") == 4


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_test_of_a_row_exists(row):
    [reference] = CODE.findall(row[-1])
    path, _, name = reference.partition("::")
    assert (ROOT / path).is_file()
    assert not name or re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), name


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_commands_stages_and_files_of_a_row_exist(row):
    here = CODE.findall(row[1])
    for command in (each for each in here if each.startswith("tunesmith ")):
        words = command.split()[1:]
        assert NAMES & {words[0], " ".join(words[:2])}, command
    for path in re.findall(r"recipes/[\w./]+", row[1]):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"the stage `(\w+)`", row[1]) + re.findall(r"the operator `(\w+)`", row[1]):
        assert name in {*STAGES, *OPERATORS}, name
