"""metrics.jsonl is read once, followed while it is written, and returned as series by name."""

from __future__ import annotations

import numpy as np
import pytest

from tunesmith.errors import StorageError
from tunesmith.monitor.metrics_file import MetricsLog, Series


def test_metrics_are_followed_line_by_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    assert log.names == set() and log.get("a/b") is None and log.last_step == 0
    path.write_text('{"step": 1, "kind": "train", "a/b": 1.5}\n{"step": 2, "kind": "tra')
    log.refresh()
    assert log.get("a/b").values.tolist() == [1.5]
    with path.open("a") as file:
        file.write('in", "a/b": null}\n')
    log.refresh()
    assert log.get("a/b").thin(10).steps.tolist() == [1] and len(log.get("a/b")) == 2
    assert log.last_step == 2 and log.train_steps == [1, 2]
    replaced = tmp_path / "new"
    replaced.write_text('{"step": 1, "kind": "train", "a/b": 9.0}\n')
    replaced.replace(path)
    log.refresh()
    assert log.get("a/b").values.tolist() == [9.0] and log.last_step == 1


def test_metrics_may_differ_between_records_and_be_text(tmp_path):
    path = tmp_path / "metrics.jsonl"
    values = ['"b": "text"', '"b": 2', '"b": 3, "c": 4', '"c": 5', '"b": 6']
    path.write_text("".join(f'{{"step": {step}, "kind": "train", {each}}}\n' for step, each in enumerate(values)))
    found = {each.name: (each.steps.tolist(), each.values.tolist()) for each in MetricsLog(path).list_series("train")}
    assert found == {"b": ([1, 2, 4], [2.0, 3.0, 6.0]), "c": ([2, 3], [4.0, 5.0])}


def test_training_and_evaluation_of_one_name_are_kept_apart(tmp_path):
    path = tmp_path / "metrics.jsonl"
    records = [(0, "eval", 1), (1, "train", 2), (2, "train", 3), (2, "eval", 4), (3, "train", 5)]
    path.write_text("".join(f'{{"step": {s}, "kind": "{kind}", "a": {value}}}\n' for s, kind, value in records))
    log = MetricsLog(path)
    assert log.get("a", "train").values.tolist() == [2, 3, 5] and log.get("a", "eval").steps.tolist() == [0, 2]
    both = log.get("a")
    assert (both.steps.tolist(), both.values.tolist()) == ([0, 1, 2, 2, 3], [1, 2, 3, 4, 5])


def test_a_damaged_line_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "kind": "train"}\nnot json\n')
    with pytest.raises(StorageError, match="line 2 is not JSON"):
        MetricsLog(path)
    for line in ('{"step": 1}', '{"step": 1, "kind": "test"}', "[1]"):
        path.write_text(f'{{"step": 1, "kind": "train"}}\n{line}\n')
        with pytest.raises(StorageError, match="line 2 is not a record of metrics"):
            MetricsLog(path)


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(tmp_path):
    class Replaced(type(tmp_path)):
        """A run is resumed right after the file was opened."""

        def open(self, mode):
            file = super().open(mode)
            if new.exists():
                new.replace(self)
            return file

    path, new = tmp_path / "metrics.jsonl", tmp_path / "new"
    path.write_text('{"step": 1, "kind": "train", "a": 1.25}\n')
    new.write_text('{"step": 1, "kind": "train", "a": 9.0}\n{"step": 2, "kind": "train", "a": 8.0}\n')
    log = MetricsLog(Replaced(path))
    log.refresh()
    assert log.get("a").values.tolist() == [9.0, 8.0]


def test_thinned_curves_keep_their_extremes():
    values = np.zeros(10_000)
    values[5_001], values[8_765] = 100.0, -7.0
    thinned = Series(name="a", steps=np.arange(10_000), values=values).thin(100)
    steps = thinned.steps.tolist()
    assert len(steps) <= 102 and steps == sorted(steps) and steps[0] == 0 and steps[-1] == 9_999
    assert thinned.values.max() == 100.0 and thinned.values.min() == -7.0
