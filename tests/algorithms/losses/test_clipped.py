"""Token losses against golden values and against formulas written out for one token."""

from __future__ import annotations

import math

import pytest
import torch

from tunesmith.algorithms.losses.policy import (
    compute_ppo_clip_losses,
    compute_sft_is_losses,
    compute_sft_losses,
    compute_sft_phi_losses,
)
from tunesmith.algorithms.scores import TokenScores


@pytest.fixture
def golden():
    """The seed and the order of draws that the golden values were made with."""
    torch.manual_seed(42)
    draws = [2 * torch.rand(5, 20) - 1 for _ in range(3)]
    mask, advantages = torch.rand(5, 20) > 0.5, 2 * torch.rand(5, 20) - 1
    return draws[0].requires_grad_(), draws[1], mask, advantages


def run_ppo(golden, **args):
    logprobs, old_logprobs, mask, advantages = golden
    scores = TokenScores(logprobs_N=logprobs[mask], old_logprobs_N=old_logprobs[mask], advantages_N=advantages[mask])
    return compute_ppo_clip_losses(scores, **args)


def test_ppo_equals_the_golden_values(golden):
    losses = run_ppo(golden)
    losses.losses_N.mean().backward()
    assert losses.losses_N.mean().item() == pytest.approx(0.26889560, abs=1e-7)
    assert golden[0].grad.norm().item() == pytest.approx(0.08723779, abs=1e-7)
    assert losses.metrics["clip_frac"].mean().item() == pytest.approx(0.35416666, abs=1e-7)
    assert losses.metrics["clip_frac_lower"].mean().item() == pytest.approx(0.0625, abs=1e-7)
    assert losses.metrics["ppo_kl"].mean().item() == pytest.approx(-0.21663447, abs=1e-7)


def test_ppo_clips_asymmetrically(golden):
    losses = run_ppo(golden, clip_range_low=0.2, clip_range_high=0.28)
    assert losses.losses_N.mean().item() == pytest.approx(0.26235420, abs=1e-7)


def test_sft_equals_the_golden_values(golden):
    logprobs, old_logprobs, mask, advantages = golden
    scores = TokenScores(logprobs_N=logprobs[mask], old_logprobs_N=old_logprobs[mask], advantages_N=advantages[mask])
    loss = compute_sft_losses(scores).losses_N.mean()
    loss.backward()
    assert loss.item() == pytest.approx(-0.07560187, abs=1e-7)
    assert logprobs.grad.norm().item() == pytest.approx(0.14433756, abs=1e-7)


def ppo_of_one_token(logprob: float, old: float, advantage: float) -> tuple[float, float]:
    """Loss and gradient, by cases."""
    ratio = math.exp(logprob - old)
    if advantage >= 0:
        return (-advantage * ratio, -advantage * ratio) if ratio <= 1.2 else (-advantage * 1.2, 0.0)
    if ratio < 0.8:
        return -advantage * 0.8, 0.0
    return (-advantage * ratio, -advantage * ratio) if ratio <= 3 else (-advantage * 3, 0.0)


def test_ppo_equals_the_formula_by_cases():
    for logprob in (-6.0, -2.2, -2.0, -1.9, -1.0, -0.2):
        for advantage in (-1.5, 0.0, 0.7):
            x = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
            old, advantages = torch.tensor([[-2.0], [advantage]], dtype=torch.float64)
            loss = compute_ppo_clip_losses(TokenScores(logprobs_N=x, old_logprobs_N=old, advantages_N=advantages))
            loss.losses_N.sum().backward()
            expected = ppo_of_one_token(logprob, -2.0, advantage)
            assert (loss.losses_N.item(), x.grad.item()) == pytest.approx(expected, rel=1e-12)


def test_ppo_is_finite_for_extreme_log_ratios():
    scores = TokenScores(
        logprobs_N=torch.tensor([0.0, -1e4]), old_logprobs_N=torch.tensor([-1e4, 0.0]), advantages_N=torch.ones(2)
    )
    assert compute_ppo_clip_losses(scores).losses_N.isfinite().all()


def test_fallback_to_policy_gradient_ignores_old_logprobs(golden):
    losses = run_ppo(golden, fallback_to_policy_gradient=True)
    logprobs, _, mask, advantages = golden
    losses.losses_N.mean().backward()
    torch.testing.assert_close(losses.losses_N, -advantages[mask])
    torch.testing.assert_close(logprobs.grad[mask], -advantages[mask] / mask.sum())
    assert losses.metrics["clip_frac"].sum() == losses.metrics["ppo_kl"].sum() == 0


@pytest.mark.parametrize(
    ("compute", "weigh"),
    [(compute_sft_is_losses, lambda p: p), (compute_sft_phi_losses, lambda p: p * (1 - p))],
)
def test_weighted_sft_has_the_gradient_of_its_weight(compute, weigh):
    x = torch.tensor([-3.0, -0.7, -0.01], dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(3, dtype=torch.float64)
    losses = compute(TokenScores(logprobs_N=x, old_logprobs_N=zeros, advantages_N=zeros)).losses_N
    losses.sum().backward()
    weights = weigh(x.detach().exp())
    torch.testing.assert_close(losses.detach(), -weights * x.detach())
    torch.testing.assert_close(x.grad, -weights)
