"""Advantages against numbers worked by hand and the golden values of the system that introduced multi_step_grpo."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.algorithms.advantages.group import (
    RunOutcome,
    compute_batch_normalized_advantages,
    compute_grpo_advantages,
    compute_maxrl_advantages,
    compute_multi_step_grpo_advantages,
)
from tunesmith.errors import ConfigError


def outcomes(*groups: list[float | None]) -> list[list[RunOutcome]]:
    """Rollout r of a group has r + 1 model calls."""
    return [[RunOutcome(reward=reward, num_turns=run + 1) for run, reward in enumerate(group)] for group in groups]


GOLDEN = outcomes([1, 0, 0, 1], [0, 0, 0, 0.5])


def assert_close(actual: list[list[float | None]], expected: list[list[float]]) -> None:
    for row, expected_row in zip(actual, expected, strict=True):
        assert row == pytest.approx(expected_row, abs=1e-6)


def test_multi_step_grpo_counts_runs():
    expected = [[0.866024, -0.866024, -0.866024, 0.866024], [-0.499998, -0.499998, -0.499998, 1.499994]]
    assert_close(compute_multi_step_grpo_advantages(GOLDEN), expected)


def test_step_norm_divides_by_the_number_of_calls():
    advantages = compute_multi_step_grpo_advantages(GOLDEN, enable_step_norm=True)
    assert advantages[0] == pytest.approx([0.866024, -0.433012, -0.288675, 0.216506], abs=1e-6)


def test_batch_level_std_keeps_the_group_mean():
    advantages = compute_multi_step_grpo_advantages(GOLDEN, std_cal_level="batch")
    expected = [[1.091551, -1.091551, -1.091551, 1.091551], [-0.272888, -0.272888, -0.272888, 0.818663]]
    assert_close(advantages, expected)


def test_grpo_counts_model_calls():
    expected = [[0.948681, -0.948681, -0.948681, 0.948681], [-0.774594, -0.774594, -0.774594, 1.161891]]
    assert_close(compute_grpo_advantages(GOLDEN), expected)


def test_grpo_equals_multi_step_grpo_when_every_rollout_makes_one_call():
    groups = [[RunOutcome(reward=reward, num_turns=1) for reward in (0.1, 0.7, 0.4)]]
    assert compute_grpo_advantages(groups) == compute_multi_step_grpo_advantages(groups)


@pytest.mark.parametrize("compute", [compute_grpo_advantages, compute_multi_step_grpo_advantages])
def test_a_group_of_one_is_dropped(compute):
    assert compute(outcomes([0.7])) == [[None]]
    assert compute(outcomes([0.7, None, None])) == [[None, None, None]]
    assert compute(outcomes([None, 0.7]), std_cal_level="batch") == [[None, None]]


@pytest.mark.parametrize("compute", [compute_grpo_advantages, compute_multi_step_grpo_advantages])
def test_group_without_variance_is_dropped(compute):
    assert compute(outcomes([0.1] * 3, [1, 0])) == [[None] * 3, compute(outcomes([1, 0]))[0]]


def test_group_below_the_threshold_is_dropped():
    groups = outcomes([0.5, 0.51], [0, 1])
    assert compute_multi_step_grpo_advantages(groups, std_threshold=0.1)[0] == [None, None]
    assert compute_multi_step_grpo_advantages(groups, std_threshold=0.1)[1] != [None, None]


def test_unscored_rollouts_do_not_affect_others():
    with_unscored = compute_multi_step_grpo_advantages(outcomes([1, None, 0, 0]))[0]
    assert with_unscored[1] is None
    assert [with_unscored[0], *with_unscored[2:]] == compute_multi_step_grpo_advantages(outcomes([1, 0, 0]))[0]


def test_group_without_scores_is_not_trained():
    assert compute_grpo_advantages(outcomes([None, None])) == [[None, None]]


def test_grpo_does_not_count_scored_rollouts_without_model_calls():
    group = [RunOutcome(reward=1.0, num_turns=0), RunOutcome(reward=0.0, num_turns=3)]
    assert compute_grpo_advantages([group]) == [[None, None]]


@given(st.lists(st.lists(st.none() | st.floats(-5, 5).map(lambda x: round(x, 3)), max_size=6), max_size=4))
def test_multi_step_grpo_equals_the_textbook(groups):
    for rewards, row in zip(groups, compute_multi_step_grpo_advantages(outcomes(*groups)), strict=True):
        scored = [reward for reward in rewards if reward is not None]
        if len(set(scored)) <= 1:
            assert row == [None] * len(rewards)
        else:
            mean, std = statistics.mean(scored), statistics.stdev(scored)
            expected = [None if reward is None else (reward - mean) / (std + 1e-6) for reward in rewards]
            assert row == [None if value is None else pytest.approx(value, abs=1e-9) for value in expected]


def test_maxrl_divides_by_the_mean_reward():
    assert compute_maxrl_advantages(outcomes([1, 0, 0, 0], [1, 1, 1, 0])) == [
        pytest.approx([3, -1, -1, -1]),
        pytest.approx([1 / 3, 1 / 3, 1 / 3, -1]),
    ]
    assert compute_maxrl_advantages(outcomes([0.5, None, 0.25])) == [pytest.approx([1 / 3, None, -1 / 3])]


def test_maxrl_drops_groups_without_a_difference():
    groups = outcomes([0, 0], [1, 1], [1], [0, None])
    assert compute_maxrl_advantages(groups) == [[None, None], [None, None], [None], [None, None]]


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(ConfigError, match="rewards of at least 0, got -0.5"):
        compute_maxrl_advantages(outcomes([1, -0.5]))


def test_batch_normalization_divides_by_the_std_of_centered_rewards():
    """Groups of another mean do not widen the std; groups with equal rewards, and unscored rollouts, are as defined."""
    rewards = [[1, 0, 0, 1], [5, 5, 5, 8], [2, 2, 2, 2]]
    centered = [reward - statistics.fmean(row) for row in rewards for reward in row]
    expected = [value / (statistics.stdev(centered) + 1e-6) for value in centered]
    found = compute_batch_normalized_advantages(outcomes(*rewards))
    assert found[0] + found[1] == pytest.approx(expected[:8], rel=1e-12)
    assert found[2] == [None] * 4
    with_unscored = [[1, None, 0, 0, 1], *rewards[1:]]
    assert compute_batch_normalized_advantages(outcomes(*with_unscored))[0] == [
        None if reward is None else pytest.approx(value)
        for reward, value in zip(with_unscored[0], [found[0][0], None, *found[0][1:]], strict=True)
    ]


def test_batch_normalization_of_one_group_is_grpo():
    groups = outcomes([1, 0, 0, 0.5])
    assert compute_batch_normalized_advantages(groups)[0] == pytest.approx(
        compute_multi_step_grpo_advantages(groups)[0]
    )
    assert compute_batch_normalized_advantages(outcomes([1], [None])) == [[None], [None]]
