"""Task order: every task once an epoch, the same after a restart."""

from __future__ import annotations

import pytest

from tunesmith.tasks.selector import TaskSelector


def test_sequential_wraps_around():
    selector = TaskSelector(10, order="sequential", seed=42)
    assert [selector.select(4) for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


def test_shuffle_is_numpys_permutation_of_seed_plus_epoch():
    selector = TaskSelector(10, order="shuffle", seed=42)
    drawn = [selector.select(4) for _ in range(5)]
    assert drawn == [[5, 6, 0, 7], [3, 2, 4, 9], [1, 8, 2, 8], [9, 5, 7, 1], [4, 6, 0, 3]]


@pytest.mark.parametrize("order", ["sequential", "shuffle"])
def test_each_epoch_visits_every_task_once(order):
    selector = TaskSelector(7, order=order, seed=3)
    drawn = [index for _ in range(7) for index in selector.select(3)]
    assert [sorted(drawn[start : start + 7]) for start in (0, 7, 14)] == [list(range(7))] * 3


def test_a_batch_may_be_larger_than_the_data_set():
    assert TaskSelector(2, order="sequential", seed=0).select(5) == [0, 1, 0, 1, 0]


def test_state_restores_what_comes_next():
    first = TaskSelector(10, order="shuffle", seed=1)
    first.select(13)
    second = TaskSelector(10, order="shuffle", seed=1)
    second.load_state_dict(first.state_dict())
    assert second.select(25) == first.select(25)


def test_no_tasks_is_an_error():
    with pytest.raises(ValueError, match="at least one task"):
        TaskSelector(0, order="shuffle", seed=0)
