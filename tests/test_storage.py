"""Atomic writes, errors of one sentence, and the names of run files."""

from __future__ import annotations

import json

import pytest

from fakes import full_disk
from tunesmith.errors import MissingDataError, StorageError
from tunesmith.storage import (
    RunPaths,
    check_free_space,
    load_json,
    load_json_lines,
    open_atomic,
    parse_checkpoint_step,
    remove_tree,
    save_json,
    save_text,
)


def test_a_file_is_replaced_atomically(tmp_path):
    path = tmp_path / "deep" / "a.txt"
    save_text(path, "one")
    save_text(path, "two")
    assert path.read_text() == "two"
    assert [p.name for p in path.parent.iterdir()] == ["a.txt"]


def test_a_failed_write_keeps_the_old_file_only(tmp_path):
    path = tmp_path / "a.txt"
    save_text(path, "old")
    with full_disk(1000), pytest.raises(StorageError, match=rf"^cannot write {path}: "):
        save_text(path, "x" * 5000)
    with pytest.raises(ZeroDivisionError), open_atomic(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_json_round_trips_floats_and_any_text(tmp_path):
    value = {"a": [0.1 + 0.2, 1e-320, -0.0], "b": None, "c": "\u00fc\U0001f600 \ud83d"}
    save_json(tmp_path / "a.json", value)
    assert load_json(tmp_path / "a.json") == value


def test_unreadable_json_is_a_storage_error(tmp_path):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(StorageError, match="it is not JSON"):
        load_json(tmp_path / "a.json")
    with pytest.raises(StorageError, match="No such file"):
        load_json(tmp_path / "b.json")


def test_json_lines_may_contain_any_text(tmp_path):
    rows = [{"text": "one\u2028two\u0085three"}, {"text": "four"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    assert load_json_lines(tmp_path / "a.jsonl") == rows
    with pytest.raises(StorageError, match=r"cannot read .*b\.jsonl"):
        load_json_lines(tmp_path / "b.jsonl")


def test_a_write_without_enough_disk_space_is_refused_before_it_starts(tmp_path):
    check_free_space(tmp_path, 1)
    with pytest.raises(StorageError, match=r"about 1073741824.00 GiB \(1152921504606846976 bytes\)"):
        check_free_space(tmp_path, 2**60)


def test_removing_a_tree_leaves_no_temporary_folder(tmp_path):
    save_text(tmp_path / "global_step_1" / "a" / "b", "x")
    remove_tree(tmp_path / "global_step_1")
    assert list(tmp_path.iterdir()) == []


def test_file_names_of_a_run(tmp_path):
    paths = RunPaths(tmp_path)
    assert paths.rollouts(12) == tmp_path / "rollouts" / "step_000012.parquet"
    assert paths.evaluation(20) == tmp_path / "eval" / "step_000020.json"
    assert paths.checkpoint(20) == tmp_path / "global_step_20"
    assert parse_checkpoint_step(paths.checkpoint(20)) == 20
    with pytest.raises(ValueError, match="not named global_step_"):
        parse_checkpoint_step(tmp_path / "global_step_20.tmp-3")


def test_a_missing_data_set_is_no_error_of_the_file_that_is_written(tmp_path):
    with pytest.raises(MissingDataError, match="^there is no corpus$"), open_atomic(tmp_path / "index"):
        raise MissingDataError("there is no corpus")
    assert not list(tmp_path.iterdir())
