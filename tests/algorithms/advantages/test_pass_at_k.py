"""Pass@k advantages against an average over all subsets of k rollouts."""

from __future__ import annotations

import itertools
import statistics

import pytest

from tunesmith.algorithms.advantages.group import RunOutcome, compute_pass_at_k_advantages


def compute(rewards: list[float | None], **args) -> list[float | None]:
    return compute_pass_at_k_advantages([[RunOutcome(reward=reward, num_turns=1) for reward in rewards]], **args)[0]


def average_over_subsets(successes: list[bool], k: int) -> list[float]:
    """The advantage of each subset as in GRPO with the population std; each rollout gets the mean over its subsets."""
    subsets = list(itertools.combinations(range(len(successes)), k))
    rewards = [float(any(successes[index] for index in subset)) for subset in subsets]
    mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    of_subset = dict(zip(subsets, ((reward - mean) / std for reward in rewards), strict=True))
    return [
        statistics.fmean(value for subset, value in of_subset.items() if index in subset)
        for index in range(len(successes))
    ]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("num_successes", [1, 2, 3])
def test_equals_the_average_over_all_subsets(num_successes, k):
    successes = [index < num_successes for index in range(7)]
    assert compute([float(success) for success in successes], k=k) == pytest.approx(average_over_subsets(successes, k))


def test_golden_value():
    """Four rollouts, one success, k = 2: P = 1/2, a success gets 1 and a failure 1/2 - 2/3 over 1/2."""
    assert compute([1, 0, 0, 0], k=2) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_unscored_rollouts_are_excluded():
    assert compute([0, None, 1, 0, None, 0], k=2) == pytest.approx([-1 / 3, None, 1.0, -1 / 3, None, -1 / 3])


@pytest.mark.parametrize(
    ("rewards", "k"),
    [
        ([0, 0, 0, 0], 2),  # no success
        ([1, 1, 1, 1], 2),
        ([1, 1, 1, 0], 2),  # fewer failures than k: every subset succeeds
        ([1, 0, 0], 3),  # one subset
        ([1, 0, None, None], 4),  # fewer scored rollouts than k
        ([1, None], 1),
        ([], 1),
    ],
)
def test_groups_whose_subsets_have_equal_rewards_are_dropped(rewards, k):
    assert compute(rewards, k=k) == [None] * len(rewards)


def test_a_success_has_at_least_the_minimum_reward():
    assert compute([0.6, 0.5, 0.2, 0.4], k=2, min_reward=0.6) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    assert compute([0.6, 0.5, 0.2, 0.4], k=2) == [None] * 4


def test_a_success_may_be_below_the_minimum_reward_by_rounding():
    assert compute([1.0 - 1e-16, 0, 0, 0], k=2) == compute([1.0, 0, 0, 0], k=2)
    assert compute([0.3, 0, 0, 0], k=2, min_reward=0.1 + 0.2) == compute([1.0, 0, 0, 0], k=2)
    assert compute([1.0 - 1e-6, 0, 0, 0], k=2) == [None] * 4
