"""Balancing work over ranks."""

from __future__ import annotations

import random

from tunesmith.trainer.rank_trainer import TOLERANCE, balance_work


def compute_loads(costs, ranks, num_ranks):
    return [sum(cost for cost, rank in zip(costs, ranks, strict=True) if rank == each) for each in range(num_ranks)]


def test_nothing_moves_where_work_is_even():
    assert balance_work([5.0] * 8, [0, 1] * 4, 2) == [0, 1] * 4


def test_uneven_work_is_balanced_with_whole_items():
    rng = random.Random(0)
    costs, owners = [rng.uniform(1, 20) for _ in range(64)], [index % 4 for index in range(64)]
    costs[::4] = [3 * cost for cost in costs[::4]]
    ranks = balance_work(costs, owners, 4)
    loads = compute_loads(costs, ranks, 4)
    assert max(loads) <= sum(loads) / 4 * (1 + 2 * TOLERANCE)
    assert sum(rank != owner for rank, owner in zip(ranks, owners, strict=True)) < 32
    assert balance_work(costs, owners, 4) == ranks


def test_a_rank_without_items_gets_some():
    assert sorted(balance_work([1.0, 1.0, 1.0], [0, 0, 0], 3)) == [0, 1, 2]


def test_one_item_that_is_most_of_the_work_stays():
    assert balance_work([100.0, 1.0], [0, 1], 2) == [0, 1]
