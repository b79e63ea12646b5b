"""The arms of the study of function calls: their settings are valid, and what they need is an arm."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.learning.function_calling_arms import ARMS, Queue
from tunesmith.commands.settings import load_eval_file, load_file, load_run_file
from tunesmith.config import SftConfig

LOADERS = {
    "tune": load_run_file,
    "pass-rate": load_run_file,
    "eval": load_eval_file,
    "sft": lambda path, overrides: load_file(SftConfig, path, overrides),
}


@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize("name", list(ARMS))
def test_the_settings_of_every_arm_are_valid(name, is_small, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setenv("MODEL", "model")
    monkeypatch.setenv("ROWS", str(tmp_path / "rows.jsonl"))
    queue = Queue(tmp_path, tmp_path, "model", is_small, [])
    for command in ARMS[name].commands:
        whole = ["-m", "tunesmith", *command]
        filled = [queue.fill(each, tmp_path) for each in [*whole, *queue.list_changes(whole)]]
        changes = [value for key, value in pairwise(filled) if key == "--set"]
        assert LOADERS[command[0]](filled[3], changes)
    assert ARMS[name].needs is None or ARMS[name].needs in list(ARMS)[: list(ARMS).index(name)]
