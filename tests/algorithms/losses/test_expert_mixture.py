"""Expert mixtures against formulas for each kind of token, and the schedule against numbers worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from token_batches import build_scores
from tunesmith.algorithms.losses.policy import (
    compute_chord_losses,
    compute_chord_terms,
    compute_mix_losses,
    compute_mix_terms,
    compute_mu,
    compute_ppo_clip_losses,
)
from tunesmith.algorithms.scores import TokenScores

LOGPROBS = [-0.3, -1.5, -0.7, -2.5]
OWN = TokenScores(
    logprobs_N=torch.tensor(LOGPROBS, dtype=torch.float64),
    old_logprobs_N=torch.tensor([-0.3, -2.0, 0.0, 0.0], dtype=torch.float64),
    advantages_N=torch.tensor([1.0, -0.5, 0.0, 0.0], dtype=torch.float64),
    is_expert_N=torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64),
)


def differentiate(compute, scores: TokenScores) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = scores.logprobs_N.clone().requires_grad_()
    losses = compute(
        TokenScores(
            logprobs_N=logprobs,
            old_logprobs_N=scores.old_logprobs_N,
            advantages_N=scores.advantages_N,
            is_expert_N=scores.is_expert_N,
        )
    ).losses_N
    losses.sum().backward()
    return losses.detach(), logprobs.grad


def test_expert_tokens_have_cross_entropy_and_sampled_tokens_ppo():
    losses, gradients = differentiate(compute_mix_losses, OWN)
    own = [-1.0, 0.5 * math.exp(0.5)]
    np.testing.assert_allclose(losses, [*own, 0.7, 2.5])
    np.testing.assert_allclose(gradients, [*own, -1.0, -1.0])


def test_chord_weights_expert_tokens_by_phi():
    losses, gradients = differentiate(compute_chord_losses, OWN)
    phi = [math.exp(-0.7) * (1 - math.exp(-0.7)), math.exp(-2.5) * (1 - math.exp(-2.5))]
    np.testing.assert_allclose(losses[2:], [phi[0] * 0.7, phi[1] * 2.5])
    np.testing.assert_allclose(gradients[2:], [-phi[0], -phi[1]])
    np.testing.assert_allclose(losses[:2], differentiate(compute_mix_losses, OWN)[0][:2])


def test_chord_gradient_vanishes_at_certain_and_improbable_tokens():
    scores = TokenScores(
        logprobs_N=torch.tensor([-1e-9, -40.0, math.log(0.5)], dtype=torch.float64),
        old_logprobs_N=torch.zeros(3, dtype=torch.float64),
        advantages_N=torch.zeros(3, dtype=torch.float64),
        is_expert_N=torch.ones(3, dtype=torch.float64),
    )
    np.testing.assert_allclose(differentiate(compute_chord_losses, scores)[1], [0, 0, -0.25], atol=1e-8)


@pytest.mark.parametrize("compute", [compute_mix_losses, compute_chord_losses])
def test_without_experts_it_is_ppo(compute):
    scores = TokenScores(
        logprobs_N=OWN.logprobs_N, old_logprobs_N=OWN.old_logprobs_N, advantages_N=torch.tensor([1.0, -1, 0.5, -0.5])
    )
    expected = compute_ppo_clip_losses(scores, clip_range_high=0.28)
    assert torch.equal(compute(scores, clip_range_high=0.28).losses_N, expected.losses_N)


def test_clip_metrics_exclude_expert_tokens():
    metrics = compute_mix_losses(OWN, clip_ratio_c=1.5).metrics
    assert metrics["clip_frac"].tolist() == [0, 0, 0, 0]
    assert metrics["clip_frac_lower"].tolist() == [0, 1, 0, 0]
    assert metrics["ppo_kl"].tolist() == [0, -0.5, 0, 0]


def test_weights_are_mu_and_one_minus_mu():
    scores = build_scores([[1.0, 1.0], [0.0]], experts=[False, True])
    terms = compute_mix_terms(scores, mu=0.25)
    assert terms.correction_E.tolist() == [0.75, 0.75, 0.25]
    assert terms.advantages_E.tolist() == [1.0, 1.0, 0.0]
    assert terms.metrics == {"expert/mu": 0.25, "expert/num_sequences": 1.0, "expert/num_tokens": 1.0}
    assert compute_mix_terms(build_scores([])).correction_E.size == 0


def test_mu_has_linear_warmup_and_cosine_decay():
    schedule = {"peak": 0.9, "valley": 0.1, "num_warmup_steps": 4, "num_decay_steps": 4}
    mus = [compute_mu(step, **schedule) for step in range(10)]
    expected = [0.0, 0.225, 0.45, 0.675, 0.9, 0.1 + 0.4 * (1 + math.sqrt(0.5)), 0.5, 0.1 + 0.4 * (1 - math.sqrt(0.5))]
    np.testing.assert_allclose(mus, [*expected, 0.1, 0.1])


def test_chord_mu_depends_on_the_step():
    args = {"mu_peak": 0.9, "mu_valley": 0.1, "mu_warmup_steps": 4, "mu_decay_steps": 4}
    for step, mu in ((2, 0.45), (6, 0.5), (99, 0.1)):
        scores = build_scores([[1.0], [0.0]], experts=[False, True], step=step)
        np.testing.assert_allclose(compute_chord_terms(scores, **args).correction_E, [1 - mu, mu])
    defaults = compute_chord_terms(build_scores([[1.0], [0.0]], experts=[False, True], step=7))
    np.testing.assert_allclose(defaults.correction_E, [0.9, 0.1])
