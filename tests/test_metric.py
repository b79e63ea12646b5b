"""The type of a metric value defines its reduction."""

from __future__ import annotations

import json

import pytest

from tunesmith.metric import Count, Max, Mean, Min, merge_metrics


def test_each_type_has_its_reduction():
    parts = [
        {"num": 1.0, "c": Count(2), "top": Max(3), "low": Min(3), "m": Mean(10.0, over=4), "only": Count(1)},
        {"num": 4.0, "c": Count(5), "top": Max(1), "low": Min(1), "m": Mean(2.0, over=1)},
    ]
    merged = merge_metrics(parts)
    assert merged == {"num": 2.5, "c": 7.0, "top": 3.0, "low": 1.0, "m": 12 / 5, "only": 1.0}
    assert {type(value) for value in merged.values()} == {float}
    assert merge_metrics(parts, weights=[3, 1])["num"] == pytest.approx(1.75)
    assert merge_metrics(parts, weights=[3, 1])["m"] == 12 / 5


def test_a_single_part_is_unchanged_bit_for_bit():
    assert merge_metrics([{"x": 0.1, "m": Mean(0.3, over=3)}], weights=[3]) == {"x": 0.1, "m": 0.3 / 3}
    assert merge_metrics([]) == {}


def test_metric_values_are_floats():
    assert json.dumps({"c": Count(2), "m": Mean(1.0, over=4)}) == '{"c": 2.0, "m": 0.25}'
    assert Mean(1.0, over=4) + 1 == 1.25


def test_mixed_reductions_of_one_name_are_refused():
    with pytest.raises(AssertionError, match="x is reported with different reductions"):
        merge_metrics([{"x": 1.0}, {"x": Count(1)}])
