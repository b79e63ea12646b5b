"""How numbers of one name combine is said by their types, and by nothing in their names."""

from __future__ import annotations

import json

import pytest

from tunesmith.metric import Count, Largest, Mean, Smallest, merge_metrics


def test_each_type_combines_in_its_own_way():
    parts = [
        {"num": 1.0, "c": Count(2), "top": Largest(3), "low": Smallest(3), "m": Mean(10.0, over=4), "only": Count(1)},
        {"num": 4.0, "c": Count(5), "top": Largest(1), "low": Smallest(1), "m": Mean(2.0, over=1)},
    ]
    merged = merge_metrics(parts)
    assert merged == {"num": 2.5, "c": 7.0, "top": 3.0, "low": 1.0, "m": 12 / 5, "only": 1.0}
    assert {type(value) for value in merged.values()} == {float}
    assert merge_metrics(parts, weights=[3, 1])["num"] == pytest.approx(1.75)
    assert merge_metrics(parts, weights=[3, 1])["m"] == 12 / 5


def test_a_single_part_keeps_its_numbers_to_the_last_bit():
    assert merge_metrics([{"x": 0.1, "m": Mean(0.3, over=3)}], weights=[3]) == {"x": 0.1, "m": 0.3 / 3}
    assert merge_metrics([]) == {}


def test_metrics_are_floats_to_everybody_else():
    assert json.dumps({"c": Count(2), "m": Mean(1.0, over=4)}) == '{"c": 2.0, "m": 0.25}'
    assert Mean(1.0, over=4) + 1 == 1.25


def test_one_name_combines_in_one_way():
    with pytest.raises(AssertionError, match="x combines in different ways"):
        merge_metrics([{"x": 1.0}, {"x": Count(1)}])
