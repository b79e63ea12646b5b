"""Baselines and selection of rollouts against golden values and numbers worked by hand."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from tunesmith.algorithms.advantages.baselines import (
    compute_asymre_advantages,
    compute_opmd_advantages,
    compute_opo_advantages,
    compute_raft_advantages,
    compute_rec_advantages,
    compute_reinforce_advantages,
    compute_rloo_advantages,
)
from tunesmith.algorithms.advantages.group import (
    RunOutcome,
    compute_beta_density,
    compute_bnpo_advantages,
    compute_dr_grpo_advantages,
    compute_grpo_advantages,
    fit_beta,
)
from tunesmith.errors import ConfigError


def outcomes(*groups: list[float | None]) -> list[list[RunOutcome]]:
    return [
        [
            RunOutcome(reward=reward, num_turns=1, turn_logprobs=((-0.1 * run - 0.01 * len(group), -1.0),))
            for run, reward in enumerate(group)
        ]
        for group in groups
    ]


GOLDEN = outcomes([1, 0, 0, 1], [0, 0, 0, 0.5])


def test_opmd_equals_the_golden_values():
    advantages = compute_opmd_advantages(GOLDEN, baseline="logavgexp", tau=0.5)
    assert advantages[0] == pytest.approx([0.28311, -0.71689, -0.71689, 0.28311], abs=1e-5)
    assert advantages[1] == pytest.approx([-0.178687, -0.178687, -0.178687, 0.321313], abs=1e-6)
    assert compute_opmd_advantages(GOLDEN) == [[0.5, -0.5, -0.5, 0.5], [-0.125, -0.125, -0.125, 0.375]]


def test_opmd_baseline_is_the_mean_for_large_tau():
    large = compute_opmd_advantages(GOLDEN, baseline="logavgexp", tau=1e6)
    for row, expected in zip(large, compute_opmd_advantages(GOLDEN), strict=True):
        assert row == pytest.approx(expected, abs=1e-6)


def test_opmd_of_small_tau_does_not_overflow():
    (row,) = compute_opmd_advantages(outcomes([1000.0, 0.0]), baseline="logavgexp", tau=0.1)
    assert row == pytest.approx([0.1 * math.log(2), 0.1 * math.log(2) - 1000])


def test_rloo_equals_the_golden_values():
    assert compute_rloo_advantages(outcomes([1, 0], [0.5, 1])) == [[1, -1], [-0.5, 0.5]]


def test_rloo_is_the_centered_reward_scaled():
    rewards = [0.3, 0.9, 0.1, 0.5]
    mean = statistics.mean(rewards)
    assert compute_rloo_advantages(outcomes(rewards))[0] == pytest.approx([4 / 3 * (r - mean) for r in rewards])


def test_reinforce_subtracts_a_constant_from_every_reward():
    assert compute_reinforce_advantages(outcomes([1, None, 0], [1])) == [[1, None, 0], [1]]
    assert compute_reinforce_advantages(outcomes([1, 0]), baseline=0.5) == [[0.5, -0.5]]


def test_opo_subtracts_the_length_weighted_mean():
    """Lengths 4, 2 and 6 over all turns, rewards 1, 0 and 0.5: b = (4 + 3) / 12."""
    turns = [((-1.0,) * 3, (-1.0,)), ((-1.0,) * 2,), ((-1.0,) * 6,), ((-1.0,) * 9,)]
    group = [
        RunOutcome(reward=reward, num_turns=len(each), turn_logprobs=each)
        for reward, each in zip([1.0, 0.0, 0.5, None], turns, strict=True)
    ]
    (row,) = compute_opo_advantages([group])
    assert row == pytest.approx([1 - 7 / 12, -7 / 12, 0.5 - 7 / 12, None])
    lengths, rewards = [4, 2, 6], [1.0, 0.0, 0.5]

    def sum_squares(baseline: float) -> float:
        return sum(n * (reward - baseline) ** 2 for n, reward in zip(lengths, rewards, strict=True))

    best = min(range(1001), key=lambda step: sum_squares(step / 1000))
    assert best / 1000 == pytest.approx(7 / 12, abs=1e-3)  # least variance if squared norms are as the lengths


def test_opo_of_equal_lengths_is_dr_grpo():
    assert compute_opo_advantages(GOLDEN) == [pytest.approx(row) for row in compute_dr_grpo_advantages(GOLDEN)]


def test_opo_drops_groups_without_a_comparison():
    empty = RunOutcome(reward=1.0, num_turns=0)
    assert compute_opo_advantages([*outcomes([1, 1], [1], [None, 0], [None]), [empty, empty]]) == [
        [None, None], [None], [None, None], [None], [None, None],
    ]  # fmt: skip


def test_asymre_shifts_the_baseline():
    advantages = compute_asymre_advantages(outcomes([1, 0, None], [1, 1], [0]))
    assert advantages[0] == pytest.approx([0.6, -0.4, None])
    assert advantages[1] == pytest.approx([0.1, 0.1])
    assert advantages[2] == pytest.approx([0.1])
    assert compute_asymre_advantages(outcomes([1, 0]), baseline_shift=0.0) == [[0.5, -0.5]]


def test_dr_grpo_is_not_divided_by_the_std():
    assert compute_dr_grpo_advantages(GOLDEN) == compute_opmd_advantages(GOLDEN)


def test_rec_normalizes_by_the_population_std():
    (row,) = compute_rec_advantages(outcomes([1, 0, 0, 1]), std_normalize=True)
    assert row == pytest.approx([1, -1, -1, 1], abs=1e-5)
    assert compute_rec_advantages(outcomes([1, 0])) == [[0.5, -0.5]]


def test_rec_balance_drops_surplus_failures():
    groups = outcomes([1, 0, 0, 0, 0, 1], [1, 1, 0], [1, 0, 0])
    advantages = compute_rec_advantages(groups, drop="balance")
    kept = [value for value in advantages[0] if value is not None]
    assert sorted(kept) == [-0.5, -0.5, 0.5, 0.5]
    assert advantages[0][0] == advantages[0][5] == 0.5
    assert None not in advantages[1] and advantages[2].count(None) == 1
    assert compute_rec_advantages(groups, drop="balance") == advantages


def test_rec_balance_drops_different_rollouts_in_different_groups():
    rows = [[1] + [0] * (5 + run) for run in range(8)]
    dropped = {
        tuple(i for i, value in enumerate(row) if value is not None)
        for row in compute_rec_advantages(outcomes(*rows), drop="balance")
    }
    assert len(dropped) > 3


def test_raft_selects_the_best_runs():
    groups = outcomes([1, 0, None, 1], [0, 0], [0.4, 0.2], [1], [0])
    assert compute_raft_advantages(groups) == [[1, None, None, 1], [None] * 2, [1, None], [1], [None]]
    assert compute_raft_advantages(groups, min_reward=0.5)[2] == [None, None]
    assert compute_raft_advantages(outcomes([-1, -2]), min_reward=-1.5) == [[1, None]]


def test_raft_selects_no_runs_by_rounding():
    assert compute_raft_advantages(outcomes([0.1 + 0.2 - 0.3, 0])) == [[None, None]]
    assert compute_raft_advantages(outcomes([0.3, 0]), min_reward=0.1 + 0.2) == [[1, None]]


CENTRED = [
    compute_rloo_advantages, compute_opmd_advantages, compute_rec_advantages, compute_dr_grpo_advantages,
    compute_bnpo_advantages,
]  # fmt: skip


@pytest.mark.parametrize("compute", CENTRED)
def test_groups_of_one_and_with_equal_rewards_are_dropped(compute):
    assert compute(outcomes([0.7], [None, 0.7], [1, 1, None], [], [None])) == [
        [None], [None, None], [None] * 3, [], [None],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "compute", [*CENTRED, compute_raft_advantages, compute_asymre_advantages, compute_reinforce_advantages]
)
def test_unscored_rollouts_do_not_affect_others(compute):
    rewards = [1, 0, 1]
    (with_none,) = compute(outcomes([1, None, 0, 1]))
    assert with_none[1] is None
    assert [with_none[0], *with_none[2:]] == compute(outcomes(rewards))[0]
    assert compute([]) == []
    assert compute(outcomes([], [None])) == [[], [None]]


def test_bnpo_divides_by_the_fitted_beta_density():
    groups = outcomes([1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1])
    means = [0.25, 0.5, 0.75, 1.0]
    a, b = fit_beta(means)
    mean, variance = statistics.mean(means), statistics.pvariance(means)
    assert a / (a + b) == pytest.approx(mean)
    assert a * b / ((a + b) ** 2 * (a + b + 1)) == pytest.approx(variance)
    advantages = compute_bnpo_advantages(groups)
    for p, row in zip(means[:3], advantages, strict=False):
        density = compute_beta_density(p, 1 + a / 3, 1 + b / 3)
        assert row[0] == pytest.approx((1 - p) / density)
        assert row[3] == pytest.approx(-p / density)
    assert advantages[3] == [None] * 4


def test_bnpo_of_one_group_is_reinforce_with_a_baseline():
    assert compute_bnpo_advantages(outcomes([1, 0, 0, 0])) == [[0.75, -0.25, -0.25, -0.25]]


@pytest.mark.parametrize("last", [0.008, 1e-7])
def test_bnpo_bounds_the_density_of_a_task_far_from_all_others(last):
    rng = random.Random(0)
    usual = [[min(max(0.5 + rng.gauss(0, 0.05), 0), 1) for _ in range(8)] for _ in range(255)]
    advantages = compute_bnpo_advantages(outcomes(*usual, [0] * 7 + [last]))
    assert advantages[-1] == pytest.approx([-last / 8 / 1e-3] * 7 + [last * 7 / 8 / 1e-3])
    means = [statistics.fmean(row) for row in usual] + [last / 8]
    a, b = fit_beta(means)
    density = compute_beta_density(means[0], 1 + a / 3, 1 + b / 3)
    assert advantages[0][0] == pytest.approx((usual[0][0] - means[0]) / density)


def test_beta_density_integrates_to_one_and_minimizes_the_variance():
    """The expected p (1 - p) / f(p)^2 under Beta(a, b) is minimal at f = Beta(1 + a/3, 1 + b/3)."""
    grid = [(i + 0.5) / 2000 for i in range(2000)]

    def expect(values: list[float]) -> float:
        return sum(values) / len(values)

    a, b = 2.0, 3.0
    weights = [compute_beta_density(p, a, b) for p in grid]
    assert expect(weights) == pytest.approx(1, abs=1e-4)

    def compute_variance(alpha: float, beta: float) -> float:
        return expect(
            [w * p * (1 - p) / compute_beta_density(p, alpha, beta) ** 2 for p, w in zip(grid, weights, strict=True)]
        )

    best = compute_variance(1 + a / 3, 1 + b / 3)
    for shift in (-0.1, 0.1):
        assert best < compute_variance(1 + a / 3 + shift, 1 + b / 3)
        assert best < compute_variance(1 + a / 3, 1 + b / 3 + shift)


def test_bnpo_refuses_rewards_outside_zero_to_one():
    with pytest.raises(ConfigError, match="'bnpo' needs rewards from 0 to 1, got -1 to 1"):
        compute_bnpo_advantages(outcomes([1, -1]))


def test_rank_penalty_favours_unlikely_runs():
    """The least likely of four rollouts keeps 1 - p/4 of its reward, the likeliest 1 - p."""
    runs = [
        RunOutcome(reward=reward, num_turns=1, turn_logprobs=((logprob,),))
        for reward, logprob in [(1, -0.1), (1, -3.0), (0, -1.0), (0, -2.0)]
    ]
    penalized = [0.5, 0.875, 0.0, 0.0]
    mean, std = statistics.mean(penalized), statistics.stdev(penalized)
    (row,) = compute_grpo_advantages([runs], rank_penalty=0.5)
    assert row == pytest.approx([(reward - mean) / (std + 1e-6) for reward in penalized])
    assert row[1] > row[0]
