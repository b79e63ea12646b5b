"""ReMax advantages against a greedy rollout, and raw rewards."""

from __future__ import annotations

import pytest

from tunesmith.algorithms.advantages.baselines import compute_remax_advantages, keep_rewards
from tunesmith.algorithms.advantages.group import RunOutcome


def outcomes(*rewards: float | None, baseline: float | None = None) -> list[RunOutcome]:
    return [RunOutcome(reward=reward, num_turns=1, baseline_reward=baseline) for reward in rewards]


def test_remax_subtracts_the_greedy_reward():
    groups = [outcomes(1.0, 0.0, None, baseline=0.75), outcomes(0.5, baseline=0.0), []]
    assert compute_remax_advantages(groups) == [[0.25, -0.75, None], [0.5], []]


def test_remax_drops_groups_without_baseline_or_with_zero_advantage():
    groups = [outcomes(1.0, 0.0), outcomes(0.3, 0.3, None, baseline=0.3), outcomes(None, baseline=1.0)]
    assert compute_remax_advantages(groups) == [[None] * 2, [None] * 3, [None]]


def test_remax_is_unbiased():
    """In expectation over two answers, a constant baseline does not change the policy gradient."""
    chance, rewards = 0.3, (1.0, 0.2)
    for baseline in (0.0, 0.2, 1.0, 5.0):
        (row,) = compute_remax_advantages([outcomes(*rewards, baseline=baseline)])
        gradient = chance * row[0] * (1 - chance) + (1 - chance) * row[1] * (0 - chance)
        assert gradient == pytest.approx(chance * (1 - chance) * (rewards[0] - rewards[1]))


def test_keep_rewards_returns_the_rewards():
    assert keep_rewards([outcomes(0.3, 0.3, None), outcomes(-1.0), []]) == [[0.3, 0.3, None], [-1.0], []]
