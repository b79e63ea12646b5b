"""The learning rate, step by step."""

from __future__ import annotations

import math

import pytest

from tunesmith.config import TrainerSection
from tunesmith.trainer.optimizer import compute_learning_rate


def trace(num_steps: int, **settings) -> list[float]:
    section = TrainerSection(learning_rate=1.0, **settings)
    return [compute_learning_rate(section, step=step, num_total_steps=num_steps) for step in range(num_steps)]


def test_constant():
    assert trace(3) == [1.0, 1.0, 1.0]


def test_warmup_rises_linearly_from_zero():
    assert trace(5, warmup_steps=3) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_warmup_ratio_is_rounded_up():
    assert trace(5, warmup_ratio=0.5) == trace(5, warmup_steps=3)
    assert trace(5, warmup_ratio=0.5, schedule="cosine") == trace(5, warmup_steps=3, schedule="cosine")


@pytest.mark.parametrize(("ratio", "num_steps"), [(0.07, 7), (0.14, 14), (0.28, 28), (0.55, 55)])
def test_a_whole_number_of_warmup_steps_is_not_rounded_up(ratio, num_steps):
    assert trace(100, warmup_ratio=ratio) == trace(100, warmup_steps=num_steps)


def test_cosine_decays_from_the_peak_to_the_minimum():
    expected = [0.5, 1.0, *(0.1 + 0.9 * (1 + math.cos(math.pi * i / 4)) / 2 for i in (1, 2, 3))]
    assert trace(5, warmup_steps=1, schedule="cosine", min_lr_ratio=0.1) == pytest.approx(expected)


def test_steps_after_the_last_stay_at_the_minimum():
    section = TrainerSection(learning_rate=1.0, schedule="cosine", min_lr_ratio=0.25)
    assert compute_learning_rate(section, step=9, num_total_steps=4) == 0.25


def test_warmup_may_be_longer_than_the_run():
    assert trace(2, warmup_steps=9, schedule="cosine") == [0.1, 0.2]
