"""Formulas of branching by hand, and the division of a group's rollouts."""

from __future__ import annotations

import math

import pytest

from tunesmith.config import BranchingSection
from tunesmith.rollout.branching.tree import (
    choose_num_initial,
    compute_branch_probability,
    compute_window_entropy,
    divide_budget,
    split_evenly,
)


def test_entropy_is_the_sum_over_the_window_in_units_of_the_uniform_distribution():
    uniform = [math.log(50)] * 9
    assert compute_window_entropy(uniform, window=4, vocab_size=50) == pytest.approx(4)
    assert compute_window_entropy([1.0, 2.0, 3.0, 100.0], window=3, vocab_size=50) == pytest.approx(6 / math.log(50))


def test_a_turn_shorter_than_the_window_counts_with_its_mean():
    assert compute_window_entropy([1.0, 3.0], window=20, vocab_size=50) == pytest.approx(20 * 2 / math.log(50))


@pytest.mark.parametrize(
    ("change", "consecutive", "expected"),
    [(0.0, 0, 0.5), (1.0, 0, 0.7), (-1.0, 0, 0.3), (9.0, 0, 1.0), (-9.0, 0, 0.0), (1.0, 2, 0.42), (9.0, 6, 0.0)],
)
def test_probability_by_hand(change, consecutive, expected):
    section = BranchingSection(base_probability=0.5, entropy_weight=0.2, consecutive_penalty=0.2)
    found = compute_branch_probability(section, change=change, num_consecutive=consecutive)
    assert found == pytest.approx(expected)


def test_shares_by_hand():
    assert split_evenly(16, 8) == [2] * 8
    assert split_evenly(16, 5) == [4, 3, 3, 3, 3]
    assert divide_budget(7, 1) == [4]  # the branch itself, and half of the other 6
    assert divide_budget(7, 2) == [3, 3]  # 5 others: 2 and 2 for the branches, 1 for the parent
    assert divide_budget(2, 2) == [1, 1]
    assert divide_budget(3, 0) == []


@pytest.mark.parametrize("budget", range(1, 12))
def test_shares_sum_to_the_budget_and_differ_by_at_most_the_branch_itself(budget):
    for num_branches in range(1, budget + 1):
        shares = divide_budget(budget, num_branches)
        left = budget - sum(shares)
        assert len(shares) == num_branches and min(shares) >= 1 and left >= 0
        given = [share - 1 for share in shares] + [left]
        assert max(given) - min(given) <= 1


def test_number_of_initial_rollouts_by_hand():
    assert choose_num_initial(16, slope=1.0, entropy_at_start=2.0, tool_entropies=[2.0, 2.0]) == 8
    # 16 * sigmoid(1 * (3 - 2)) = 11.7
    assert choose_num_initial(16, slope=1.0, entropy_at_start=3.0, tool_entropies=[1.0, 3.0]) == 12
    assert choose_num_initial(16, slope=1e6, entropy_at_start=3.0, tool_entropies=[1.0]) == 16
    assert choose_num_initial(16, slope=1e6, entropy_at_start=1.0, tool_entropies=[3.0]) == 1
