from __future__ import annotations

import json
import math

import pytest

from fakes import full_disk
from tunesmith.errors import StorageError
from tunesmith.monitor.metrics_file import append_metrics, load_metrics, trim_metrics


def write_steps(path, steps, *, committed_step=None):
    trim_metrics(path, committed_step=committed_step)
    for step in steps:
        append_metrics(path, step, "train", {"train/loss": step / 3, "perf/rollout_s": 0.5})


def test_a_line_is_one_object_with_exact_floats(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1, 2])
    lines = path.read_text().splitlines()
    assert json.loads(lines[1]) == {"step": 2, "kind": "train", "train/loss": 2 / 3, "perf/rollout_s": 0.5}
    assert load_metrics(path)[0]["train/loss"] == 1 / 3


def test_non_finite_numbers_are_null(tmp_path):
    path = tmp_path / "m.jsonl"
    append_metrics(path, 1, "eval", {"a": math.nan, "b": math.inf, "c": 0.0})
    assert load_metrics(path) == [{"step": 1, "kind": "eval", "a": None, "b": None, "c": 0.0}]


def test_resuming_drops_uncommitted_steps_and_a_truncated_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1, 2, 3, 4])
    with path.open("a") as file:
        file.write('{"step": 5, "ki')
    assert [record["step"] for record in load_metrics(path)] == [1, 2, 3, 4]
    write_steps(path, [3], committed_step=2)
    uninterrupted = tmp_path / "other.jsonl"
    write_steps(uninterrupted, [1, 2, 3])
    assert path.read_bytes() == uninterrupted.read_bytes()


def test_a_new_run_keeps_no_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [0, 1])
    write_steps(path, [0])
    assert [record["step"] for record in load_metrics(path)] == [0]


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "kind": "eval"}\n{"ste\n{"step": 3}\n')
    with pytest.raises(StorageError, match="line 2 is not JSON"):
        trim_metrics(path, committed_step=3)


def test_a_full_disk_keeps_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_metrics(path, 1, "train", {"a": 1.0})
    whole = path.read_text()
    with full_disk(len(whole) + 5), pytest.raises(StorageError, match=r"^cannot write .*metrics\.jsonl"):
        append_metrics(path, 2, "train", {"a": 2.0})
    assert path.read_text() == whole
    append_metrics(path, 2, "train", {"a": 2.0})
    assert [record["step"] for record in load_metrics(path)] == [1, 2]


@pytest.mark.parametrize("line", ['{"kind": "train"}', "[1]", '{"step": 1}'])
def test_a_run_is_not_resumed_on_a_line_that_is_no_record(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "kind": "train"}}\n{line}\n')
    with pytest.raises(StorageError, match="line 2 is not a record of metrics"):
        trim_metrics(path, committed_step=1)
