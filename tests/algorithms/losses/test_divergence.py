"""DPPO's losses against equations 12 to 14 of the paper, token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tunesmith.algorithms.losses.policy import compute_dppo_kl_losses, compute_dppo_tv_losses
from tunesmith.algorithms.scores import TokenScores

LOSSES = {"tv": compute_dppo_tv_losses, "kl": compute_dppo_kl_losses}


def run_one(compute, p: float, q: float, advantage: float, **args) -> tuple[float, float, float]:
    """Loss, its gradient by the logprob, and `clip_frac` of a token of probability p, sampled with probability q."""
    x = torch.tensor([math.log(p)], dtype=torch.float64, requires_grad=True)
    old, advantages = torch.tensor([[math.log(q)], [advantage]], dtype=torch.float64)
    losses = compute(TokenScores(logprobs_N=x, old_logprobs_N=old, advantages_N=advantages), **args)
    losses.losses_N.sum().backward()
    return losses.losses_N.item(), x.grad.item(), losses.metrics["clip_frac"].item()


def diverge(kind: str, p: float, q: float) -> float:
    return abs(p - q) if kind == "tv" else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


@pytest.mark.parametrize("advantage", [-1.5, 0.0, 0.7])
@pytest.mark.parametrize("q", [1e-4, 0.01, 0.3, 0.6, 0.9, 0.999])
@pytest.mark.parametrize("kind", LOSSES)
def test_the_loss_equals_the_formula(kind, q, advantage):
    limit = {"tv": 0.2, "kl": 0.05}[kind]
    outcomes = set()
    for p in (1e-5, 1e-3, 0.02, 0.15, 0.29, 0.31, 0.55, 0.75, 0.95, 0.9999):
        is_masked = diverge(kind, p, q) > limit and ((advantage > 0 and p > q) or (advantage < 0 and p < q))
        expected = 0.0 if is_masked else -advantage * p / q
        assert run_one(LOSSES[kind], p, q, advantage) == pytest.approx((expected, expected, float(is_masked)), rel=1e-9)
        outcomes.add(is_masked)
    assert advantage == 0 or q not in (0.3, 0.6) or outcomes == {False, True}


def test_improbable_tokens_move_further_and_probable_tokens_less_far_than_under_the_clip_of_ppo():
    """The paper's example (section 4.2): 1e-4 to 1e-2 changes the distribution by 0.01, .99 to .75 by .24."""
    assert run_one(compute_dppo_tv_losses, 1e-2, 1e-4, 1.0)[1] == pytest.approx(-100)
    assert run_one(compute_dppo_tv_losses, 0.75, 0.99, -1.0)[1] == 0
    assert run_one(compute_dppo_tv_losses, 0.80, 0.99, -1.0)[1] == pytest.approx(0.80 / 0.99)


@pytest.mark.parametrize("kind", LOSSES)
def test_the_limits_are_separate_for_gains_and_losses(kind):
    args = {"delta_low": 0.9, "delta_high": 0.01}
    assert run_one(LOSSES[kind], 0.5, 0.3, 1.0, **args)[2] == 1
    assert run_one(LOSSES[kind], 0.3, 0.5, -1.0, **args)[2] == 0
    args = {"delta_low": 0.01, "delta_high": 0.9}
    assert run_one(LOSSES[kind], 0.5, 0.3, 1.0, **args)[2] == 0
    assert run_one(LOSSES[kind], 0.3, 0.5, -1.0, **args)[2] == 1


@pytest.mark.parametrize("kind", LOSSES)
def test_a_cap_truncates_the_weight(kind):
    found = run_one(LOSSES[kind], 0.04, 0.004, -0.5, ratio_cap=5.0)
    assert found == pytest.approx((0.5 * 5, 0.5 * 5, 0.0))


@pytest.mark.parametrize("kind", LOSSES)
def test_the_regularizer_acts_on_masked_tokens_too(kind):
    d = math.log(0.9 / 0.3)
    assert run_one(LOSSES[kind], 0.9, 0.3, 1.0, regularizer_coef=0.1) == pytest.approx((0.1 * d**2, 0.2 * d, 1.0))
    d = math.log(0.31 / 0.3)
    found = run_one(LOSSES[kind], 0.31, 0.3, 1.0, regularizer_coef=0.1)
    assert found == pytest.approx((0.1 * d**2 - 0.31 / 0.3, 0.2 * d - 0.31 / 0.3, 0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probabilities_of_one_have_finite_divergences(dtype):
    """Also where the sampler rounds a probability to 1 and the trainer does not."""
    x = torch.tensor([0.0, 0.0, -1e-6, -1e-6, 0.0], dtype=dtype, requires_grad=True)
    old = torch.tensor([0.0, -1e-6, 0.0, -1e-6, -1.0], dtype=dtype)
    losses = compute_dppo_kl_losses(
        TokenScores(logprobs_N=x, old_logprobs_N=old, advantages_N=torch.ones(5, dtype=dtype))
    )
    losses.losses_N.sum().backward()
    assert losses.metrics["clip_frac"].tolist() == [0, 0, 0, 0, 1]
    assert x.grad[:4].tolist() == pytest.approx([-1.0] * 4, abs=1e-5) and x.grad[4] == 0


def test_binary_divergences_are_lower_bounds():
    """Of the divergences over the vocabulary (appendix B): a token that is masked is outside the trust region."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        p, q = rng.dirichlet(np.ones(6), size=2)
        tv, kl = np.abs(p - q).sum() / 2, (q * np.log(q / p)).sum()
        for token in range(6):
            advantage = 1.0 if p[token] > q[token] else -1.0
            for kind, divergence in (("tv", tv), ("kl", kl)):
                args = {"delta_low": divergence + 1e-12, "delta_high": divergence + 1e-12}
                assert run_one(LOSSES[kind], p[token], q[token], advantage, **args)[2] == 0
