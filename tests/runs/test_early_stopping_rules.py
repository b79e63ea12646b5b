"""The rules of early stopping and of the best evaluation on given series."""

from __future__ import annotations

import math

import pytest

from tunesmith.config import EarlyStoppingSection, KeepBestSection
from tunesmith.errors import ConfigError
from tunesmith.runs.early_stopping import BestEvaluation, EarlyStopping

METRIC = "eval/test/reward"


def find_end(values, **rule):
    """The step after which the run ends; values start at step 0."""
    stopping = EarlyStopping(EarlyStoppingSection(metric=METRIC, **rule))
    for step, value in enumerate(values):
        stopping.add(step, "train", {"train/loss": 0.0})
        stopping.add(step, "eval", {} if value is None else {METRIC: value})
        if stopping.reason is not None:
            return step
    return None


@pytest.mark.parametrize(
    ("values", "rule", "end"),
    [
        ([0.5, 0.4, 0.4, 0.4, 0.4], {"patience": 3}, 3),
        ([0.5, 0.4, 0.6, 0.4, 0.6, 0.5], {"patience": 2}, 4),
        ([0.1, 0.2, 0.3, 0.4], {"patience": 1}, None),
        ([0.1, 0.1], {"patience": 1}, 1),
        ([1.0, 1.05, 1.1, 1.2], {"patience": 2, "min_delta": 0.1}, 2),
        ([3.0, 2.0, 1.0, 1.0], {"patience": 1, "mode": "min"}, 3),
        ([0.1, 0.5, 0.95, 1.0], {"target": 0.9}, 2),
        ([0.1, 0.9], {"target": 0.9, "patience": None}, 1),
        ([3.0, 1.0], {"target": 1.0, "mode": "min"}, 1),
        ([1.0, 0.2, 0.3], {"target": 0.9, "patience": None}, None),
        ([0.5, 0.4, 0.4, 0.4, 0.4], {"patience": 1, "min_steps": 3}, 3),
        ([0.5, None, math.nan, None, 0.4], {"patience": 1}, 4),
    ],
)
def test_a_series_ends_the_run_where_its_rule_says(values, rule, end):
    assert find_end(values, **rule) == end


def test_a_metric_of_steps_counts_steps():
    stopping = EarlyStopping(EarlyStoppingSection(metric="rollout/reward_mean", patience=2))
    for step, value in enumerate([0.2, 0.1, 0.1], start=1):
        stopping.add(step, "eval", {METRIC: 1.0})
        stopping.add(step, "train", {"rollout/reward_mean": value})
    assert "has not improved on 0.2 of step 1 in 2 steps" in stopping.reason


def test_the_first_of_equal_evaluations_is_the_best_and_the_initial_model_is_none():
    best = BestEvaluation(KeepBestSection(metric=METRIC))
    for step, value in enumerate([0.9, 0.3, 0.5, 0.5, 0.4]):
        best.add(step, "eval", {METRIC: value})
    assert (best.best.step, best.best.value) == (2, 0.5)


def test_a_metric_that_only_some_steps_report_is_not_misspelt():
    stopping = EarlyStopping(EarlyStoppingSection(metric="train/clip_frac"))
    stopping.add(1, "train", {"train/num_updates": 0.0})
    stopping.add(2, "train", {"train/num_updates": 1.0, "train/clip_frac": 0.1})
    stopping.add(3, "train", {"train/num_updates": 1.0})
    evaluations = BestEvaluation(KeepBestSection(metric="eval/test/accuracy"))
    evaluations.add(1, "eval", {"eval/test/num_failures": 4.0, "eval/other/reward": 1.0})
    with pytest.raises(ConfigError, match=r"'eval/test/accuracy' is not reported; available: eval/test/reward"):
        evaluations.add(2, "eval", {"eval/test/reward": 1.0})
