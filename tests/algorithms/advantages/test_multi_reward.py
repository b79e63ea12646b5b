"""GDPO against the paper's formula in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from tunesmith.algorithms.advantages.group import RunOutcome, compute_gdpo_advantages, compute_grpo_advantages
from tunesmith.errors import ConfigError

ACCURACY = [[1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 1, 0]]
FORMAT = [[0.2, 0.9, 0.1, 0.4], [0.3, 0.3, 0.8, 0.6], [1, 1, 1, 1]]


def outcomes(accuracy=ACCURACY, form=FORMAT) -> list[list[RunOutcome]]:
    return [
        [
            RunOutcome(
                reward=None if a is None else a + f,
                num_turns=1,
                metrics={} if a is None else {"accuracy": a, "format": f},
            )
            for a, f in zip(*rows, strict=True)
        ]
        for rows in zip(accuracy, form, strict=True)
    ]


def compute_textbook(parts: list[np.ndarray], weights: list[float], epsilon: float) -> np.ndarray:
    """Parts are [groups, rollouts]."""
    total = sum(
        weight * (part - part.mean(1, keepdims=True)) / (part.std(1, ddof=1, keepdims=True) + epsilon)
        for part, weight in zip(parts, weights, strict=True)
    )
    return (total - total.mean()) / (total.std(ddof=1) + epsilon)


@pytest.mark.parametrize("epsilon", [1e-6, 0.1])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 0.3), (0.5, -2.0)])
def test_equals_the_textbook(weights, epsilon):
    found = compute_gdpo_advantages(
        outcomes(), rewards=dict(zip(("accuracy", "format"), weights, strict=True)), epsilon=epsilon
    )
    expected = compute_textbook([np.array(ACCURACY), np.array(FORMAT)], list(weights), epsilon)
    np.testing.assert_allclose(np.array(found, dtype=float), expected, atol=1e-12)


def test_rewards_with_equal_sums_are_distinguished():
    """GRPO on the sum gives (1, 0.1) and (0, 1.1) the same advantage."""
    groups = outcomes([[1, 0, 0, 0]], [[0.1, 1.1, 0.1, 0.1]])
    grpo = compute_grpo_advantages(groups)[0]
    gdpo = compute_gdpo_advantages(
        outcomes([[1, 0, 0, 0]], [[0.1, 1.1, 0.0, 0.1]]), rewards={"accuracy": 1.0, "format": 0.5}
    )[0]
    assert grpo[0] == pytest.approx(grpo[1])
    assert gdpo[0] > gdpo[1] + 0.5


def test_one_reward_is_grpo_over_the_std_of_the_step():
    groups = outcomes()
    plain = compute_gdpo_advantages(groups, rewards={"format": 3.0})
    std = np.std([(row - row.mean()) / row.std(ddof=1) for row in np.array(FORMAT[:2])] + [np.zeros(4)], ddof=1)
    for found, row in zip(plain[:2], np.array(FORMAT[:2]), strict=True):
        assert found == pytest.approx((row - row.mean()) / row.std(ddof=1) / std, rel=1e-4)
    assert plain[2] == [None] * 4


def test_groups_without_any_difference_are_dropped_but_part_of_the_std():
    args = {"rewards": {"accuracy": 1.0, "format": 1.0}}
    groups = outcomes([[1, 0], [1, 1]], [[0.5, 0.5], [0.2, 0.2]])
    both, alone = compute_gdpo_advantages(groups, **args), compute_gdpo_advantages(groups[:1], **args)
    assert both[1] == [None, None]
    # the values are 1 and -1 over sqrt(2): their std is 1 over two rollouts and sqrt(1 / 3) over four
    assert alone[0] == pytest.approx([2**-0.5, -(2**-0.5)], rel=1e-5)
    assert both[0] == pytest.approx([1.5**0.5, -(1.5**0.5)], rel=1e-5)


def test_unscored_rollouts_and_groups_of_one():
    groups = outcomes([[1, None, 0, 0], [1], [None, 1]], [[0.5, 0, 0.5, 0.5], [0.3], [0, 0.2]])
    found = compute_gdpo_advantages(groups, rewards={"accuracy": 1.0, "format": 1.0})
    assert found[0][1] is None and found[0][0] > 0 > found[0][2] == found[0][3]
    assert found[1:] == [[None], [None, None]]


def test_a_missing_reward_is_an_error_that_names_it():
    groups = [[RunOutcome(reward=1.0, num_turns=1, metrics={"accuracy": 1.0})]]
    with pytest.raises(ConfigError, match=r"names 'format', but the judge .* \(it has accuracy\)"):
        compute_gdpo_advantages(groups, rewards={"accuracy": 1.0, "format": 1.0})
    with pytest.raises(ConfigError, match="'gdpo' needs algorithm.advantage_args.rewards"):
        compute_gdpo_advantages(groups)


@pytest.mark.parametrize("rewards", [{}, {"accuracy": 0.0}, {"accuracy": 1.0, "format": float("inf")}])
def test_weights_are_finite_and_not_zero(rewards):
    with pytest.raises(ConfigError, match="finite weights other than 0"):
        compute_gdpo_advantages([], rewards=rewards)
