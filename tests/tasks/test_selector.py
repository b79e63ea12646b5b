"""Task orders equal those of published code, visit every task once per epoch, and survive a restart."""

from __future__ import annotations

import numpy as np
import pytest

from tunesmith.tasks.selector import (
    OrderedSelector,
    RandomSelector,
    build_easy_to_hard,
    build_sequential,
    build_shuffle,
)

TEN = np.zeros((10, 0))
PASS_RATES = np.array([[0.1, 0.9, 0.5, 0.5, 0, 1, 0.3, 0.7, 0.2, 0.5]]).T
ORDERS = [build_sequential, build_shuffle, RandomSelector]


def draw(selector, num_batches):
    return [selector.select(4) for _ in range(num_batches)]


def test_sequential_wraps_around():
    assert draw(build_sequential(TEN, seed=42), 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


def test_shuffle_is_the_numpy_permutation_of_seed_plus_epoch():
    drawn = draw(build_shuffle(TEN, seed=42), 5)
    assert drawn == [[5, 6, 0, 7], [3, 2, 4, 9], [1, 8, 2, 8], [9, 5, 7, 1], [4, 6, 0, 3]]


def test_random_draws_without_replacement_within_a_batch():
    drawn = draw(RandomSelector(TEN, seed=42), 4)
    assert drawn == [[4, 0, 5, 6], [7, 0, 3, 1], [8, 5, 6, 9], [5, 1, 2, 8]]


def test_random_with_replacement_repeats_tasks():
    drawn = RandomSelector(TEN, seed=0, replace=True).select(50)
    assert len(drawn) == 50 and set(drawn) <= set(range(10))
    assert any(len(set(RandomSelector(TEN, seed=s, replace=True).select(10))) < 10 for s in range(3))


def test_a_random_batch_larger_than_the_data_set_has_every_task_before_one_repeats():
    drawn = RandomSelector(TEN, seed=0).select(25)
    assert sorted(drawn[:10]) == sorted(drawn[10:20]) == list(range(10))
    assert len(set(drawn[20:])) == 5


def test_easy_to_hard_starts_at_the_highest_pass_rate_and_the_last_of_ties():
    assert draw(build_easy_to_hard(PASS_RATES, seed=0), 3) == [[5, 1, 7, 9], [3, 2, 6, 8], [0, 4, 5, 1]]


def test_later_columns_break_ties():
    features = np.array([[0.5, 0.1], [0.5, 0.9], [0.7, 0.0]])
    assert build_easy_to_hard(features, seed=0).select(3) == [2, 1, 0]


@pytest.mark.parametrize("build", [build_sequential, build_shuffle])
def test_each_epoch_visits_every_task_once(build):
    selector = build(np.zeros((7, 0)), seed=3)
    drawn = [index for _ in range(7) for index in selector.select(3)]
    assert [sorted(drawn[start : start + 7]) for start in (0, 7, 14)] == [list(range(7))] * 3


def test_a_batch_may_be_larger_than_the_data_set():
    assert build_sequential(np.zeros((2, 0)), seed=0).select(5) == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("build", ORDERS)
def test_a_restored_state_continues_the_same_selections(build):
    first, second = build(TEN, seed=1), build(TEN, seed=1)
    first.select(13)
    second.load_state_dict(first.state_dict())
    assert second.select(25) == first.select(25)


def test_no_tasks_is_an_error():
    with pytest.raises(ValueError, match="at least one task"):
        OrderedSelector(0, lambda epoch: np.arange(0))
