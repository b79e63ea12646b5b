"""Returns, GAE and whitening against double sums, numbers worked by hand and known limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from token_batches import build_scores
from tunesmith.algorithms.advantages.returns import (
    compute_explained_variance,
    compute_gae,
    compute_ppo_terms,
    compute_reinforce_plus_plus_terms,
    compute_returns,
    whiten,
)

REWARDS = np.array([0.0, 0.0, 1.0, 0.0, -2.0])
VALUES = np.array([0.5, 0.6, 0.7, -0.1, 0.2])
SEQUENCES = np.array([0, 0, 0, 1, 1])
GAMMA, LAM = 0.9, 0.8


def sum_gae(rewards, values, sequences, gamma, lam) -> list[float]:
    """The definition: the sum over later tokens l of (gamma lam)^l delta, with nothing after the last token."""
    advantages = []
    for t in range(len(rewards)):
        total = 0.0
        for k in range(t, len(rewards)):
            if sequences[k] != sequences[t]:
                break
            has_next = k + 1 < len(rewards) and sequences[k + 1] == sequences[k]
            delta = rewards[k] + gamma * (values[k + 1] if has_next else 0.0) - values[k]
            total += (gamma * lam) ** (k - t) * delta
        advantages.append(total)
    return advantages


def test_gae_by_hand():
    deltas = [0.9 * 0.6 - 0.5, 0.9 * 0.7 - 0.6, 1 - 0.7, 0.9 * 0.2 + 0.1, -2 - 0.2]
    expected = [
        deltas[0] + 0.72 * deltas[1] + 0.72**2 * deltas[2],
        deltas[1] + 0.72 * deltas[2],
        deltas[2],
        deltas[3] + 0.72 * deltas[4],
        deltas[4],
    ]
    np.testing.assert_allclose(compute_gae(REWARDS, VALUES, SEQUENCES, gamma=GAMMA, lam=LAM), expected)


@given(
    st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.booleans()), max_size=9),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_gae_equals_its_definition(tokens, gamma, lam):
    rewards, values = (np.array([token[i] for token in tokens]) for i in (0, 1))
    sequences = np.cumsum([token[2] for token in tokens], dtype=np.int64)
    actual = compute_gae(rewards, values, sequences, gamma=gamma, lam=lam)
    np.testing.assert_allclose(actual, sum_gae(rewards, values, sequences, gamma, lam), atol=1e-9)


def test_gae_with_lambda_one_is_return_minus_value():
    returns = compute_returns(REWARDS, SEQUENCES, gamma=GAMMA)
    np.testing.assert_allclose(returns, [0.81, 0.9, 1.0, -1.8, -2.0])
    np.testing.assert_allclose(compute_gae(REWARDS, VALUES, SEQUENCES, gamma=GAMMA, lam=1.0), returns - VALUES)


def test_gae_without_values_and_discount_is_the_reward():
    advantages = compute_gae(REWARDS, np.zeros(5), SEQUENCES, gamma=1.0, lam=1.0)
    np.testing.assert_array_equal(advantages, [1, 1, 1, -2, -2])


def test_gae_with_lambda_zero_looks_one_token_ahead():
    advantages = compute_gae(REWARDS, VALUES, SEQUENCES, gamma=1.0, lam=0.0)
    np.testing.assert_allclose(advantages, [0.1, 0.1, 0.3, 0.3, -2.2])


def test_exact_values_have_zero_advantage():
    values = compute_returns(REWARDS, SEQUENCES, gamma=GAMMA)
    np.testing.assert_allclose(compute_gae(REWARDS, values, SEQUENCES, gamma=GAMMA, lam=0.4), np.zeros(5), atol=1e-12)
    assert compute_explained_variance(values, values) == 1
    assert compute_explained_variance(np.zeros(5), values) == 0


def test_whitening_equals_the_formula():
    values = np.array([0.3, -1.0, 2.0, 2.0])
    x = torch.from_numpy(values)
    np.testing.assert_allclose(whiten(values), ((x - x.mean()) * torch.rsqrt(x.var() + 1e-8)).numpy())
    assert whiten(np.array([3.0])).tolist() == [0.0]
    assert whiten(np.full(4, 0.1)).tolist() == [0.0] * 4
    assert whiten(np.zeros(0)).size == 0


@pytest.mark.parametrize("num_tokens", [3, 18, 41])
def test_equal_values_whiten_to_exact_zeros(num_tokens):
    values = np.full(num_tokens, 0.1)
    assert values.mean() != 0.1, "the mean is rounded"
    assert whiten(values).tolist() == [0.0] * num_tokens


def test_equal_rewards_have_no_explained_variance():
    """Returns are advantage plus value, so those of equal rewards differ by rounding."""
    values = np.random.default_rng(0).normal(size=(3, 4)).tolist()
    terms = compute_ppo_terms(build_scores([[1.0] * 4] * 3, values=values))
    assert terms.returns_E.var() > 0
    assert terms.metrics["critic/explained_variance"] == 0


def test_ppo_terms_have_returns_and_whitened_advantages():
    scores = build_scores([[1.0] * 3, [-2.0] * 2], values=[[0.5, 0.6, 0.7], [-0.1, 0.2]])
    terms = compute_ppo_terms(scores, gamma=GAMMA, lam=LAM)
    advantages = compute_gae(REWARDS, VALUES, SEQUENCES, gamma=GAMMA, lam=LAM)
    np.testing.assert_allclose(terms.returns_E, advantages + VALUES)
    np.testing.assert_allclose(terms.advantages_E, whiten(advantages))
    assert terms.correction_E is None
    assert terms.metrics["critic/return_mean"] == pytest.approx((advantages + VALUES).mean())


def test_kl_is_subtracted_from_every_tokens_reward():
    scores = build_scores(
        [[1.0, 1.0], [0.0, 0.0]],
        old=[[-1.0, -2.0], [-0.5, -0.5]],
        reference_logprobs=[[-1.5, -1.0], [-0.5, -1.5]],
        values=[[0.0, 0.0], [0.0, 0.0]],
    )
    rewards = [-0.1 * 0.5, 1.0 + 0.1 * 1.0, 0.0, -0.1 * 1.0]
    returns = [rewards[0] + rewards[1], rewards[1], rewards[2] + rewards[3], rewards[3]]
    np.testing.assert_allclose(compute_ppo_terms(scores, reward_kl_coef=0.1).returns_E, returns)
    terms = compute_reinforce_plus_plus_terms(scores, reward_kl_coef=0.1)
    np.testing.assert_allclose(terms.advantages_E, whiten(np.array(returns)))


def test_reinforce_plus_plus_discounts_and_whitens_over_all_tokens():
    scores = build_scores([[1.0] * 3, [-2.0] * 2])
    np.testing.assert_allclose(
        compute_reinforce_plus_plus_terms(scores).advantages_E, whiten([1, 1, 1, -2, -2] * np.ones(5))
    )
    terms = compute_reinforce_plus_plus_terms(scores, gamma=0.5)
    np.testing.assert_allclose(terms.advantages_E, whiten(np.array([0.25, 0.5, 1.0, -1.0, -2.0])))
    assert terms.metrics["algorithm/return_mean"] == pytest.approx(-0.25)


@pytest.mark.parametrize("rows", [[], [[0.7]], [[0.7], [0.7]]])
def test_updates_without_variance_have_no_advantage(rows):
    scores = build_scores(rows, values=[[0.0] * len(row) for row in rows])
    for compute in (compute_ppo_terms, compute_reinforce_plus_plus_terms):
        assert compute(scores).advantages_E.tolist() == [0.0] * len(rows)
