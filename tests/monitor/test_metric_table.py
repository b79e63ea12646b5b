"""The table of a metrics.jsonl, and the curve that notebooks show."""

from __future__ import annotations

import json
import re

import pytest

from tunesmith.monitor.metric_table import draw_curve
from tunesmith.monitor.metrics_file import MetricsLog

RECORDS = [
    {"step": 0, "kind": "eval", "eval/test/reward": 0.25},
    {"step": 1, "kind": "train", "train/loss": 0.5, "train/kl": None},
    {"step": 2, "kind": "train", "train/loss": 0.25, "train/kl": 1.0},
    {"step": 2, "kind": "eval", "eval/test/reward": 0.75},
]


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return MetricsLog(path).to_table()


def test_a_step_is_one_row_of_training_and_evaluation(table):
    assert table.steps == (0, 1, 2)
    assert len(table) == 3
    assert table.columns == ("eval/test/reward", "train/loss", "train/kl")
    assert table["eval/test/reward"] == [0.25, None, 0.75]
    assert table.rows[2] == {"train/loss": 0.25, "train/kl": 1.0, "eval/test/reward": 0.75}
    assert table.collect_points("train/kl") == [(2, 1.0)]
    with pytest.raises(KeyError, match="train/los"):
        table["train/los"]


def test_the_table_converts_to_pandas_by_step(table):
    frame = table.to_pandas()
    assert frame.index.name == "step" and list(frame.index) == [0, 1, 2]
    assert frame["train/loss"].iloc[1:].tolist() == [0.5, 0.25]
    assert frame["train/kl"].isna().tolist() == [True, True, False]


def test_the_table_prints_one_line_and_shows_as_html(table, tmp_path):
    assert repr(table) == "MetricTable: steps 0 to 2, 3 columns"
    assert "train/loss" in table._repr_html_()
    empty = MetricsLog(tmp_path / "none.jsonl").to_table()
    assert (repr(empty), empty.columns, empty.to_pandas().shape) == ("MetricTable: no steps", (), (0, 0))
    assert "no steps" in empty._repr_html_()


def test_a_curve_spans_its_box_and_needs_two_points():
    assert draw_curve("a<b", [(1, 0.5)]) == ""
    svg = draw_curve("a<b", [(1, 0.0), (2, 3.0), (3, 1.0)])
    points = [tuple(map(float, pair.split(","))) for pair in re.search('points="([^"]*)"', svg)[1].split()]
    assert points == [(6.0, 84.0), (180.0, 6.0), (354.0, 58.0)]
    assert "a&lt;b: 0 at step 1, 1 at step 3" in svg
    assert draw_curve("flat", [(1, 2.0), (5, 2.0)]).count("84.0") == 2
