"""ORPO and SimPO in float64 against autograd of the textbook losses, and against TRL's loss functions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_preference import (
    DPO_GROUPS,
    DPO_LABELS,
    LENGTHS,
    PeerTrainer,
    assert_same,
    compute_token_losses,
    differentiate,
    draw,
)
from test_preference import run_ours as run_with_reference
from torch.nn import functional

from token_batches import build_scores
from tunesmith.algorithms.losses.preference import compute_dpo_terms, compute_orpo_terms, compute_simpo_terms

CHOSEN, REJECTED = [0, 3, 4], [1, 2, 5]


def run_ours(compute_terms, policy, labels=DPO_LABELS, groups=DPO_GROUPS, **args) -> tuple[float, torch.Tensor, dict]:
    """The loss, its gradient by each token's logprob, and the metrics; there are no reference logprobs."""
    scores = build_scores(
        [[label] * len(row) for label, row in zip(labels, policy, strict=True)],
        groups=groups,
        logprobs=[row.tolist() for row in policy],
    )
    terms = compute_terms(scores, **args)
    losses, logprobs = compute_token_losses(terms, policy)
    loss = losses.sum()
    loss.backward()
    return loss.item(), logprobs.grad, terms.metrics


def gather_means(policy) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean logprob of the chosen and of the rejected completions."""
    means = torch.stack([row.mean() for row in policy])
    return means[CHOSEN], means[REJECTED]


def compute_orpo_reference(policy, odds_coef: float) -> torch.Tensor:
    """Equations 3, 4, 6 and 7 of the paper as written, with probabilities."""
    chosen, rejected = (means.exp() for means in gather_means(policy))
    odds_ratio = (chosen / (1 - chosen)) / (rejected / (1 - rejected))
    return (-chosen.log() - odds_coef * functional.logsigmoid(odds_ratio.log())).mean()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("odds_coef", [0.0, 0.1, 2.0])
def test_orpo_equals_autograd_of_the_textbook(odds_coef, seed):
    policy, _ = draw(seed)
    ours = run_ours(compute_orpo_terms, policy, odds_coef=odds_coef)
    assert_same(ours, differentiate(policy, compute_orpo_reference(policy, odds_coef)))
    chosen, _ = gather_means(policy)
    assert ours[2]["preference/sft_loss"] == pytest.approx(-chosen.mean().item())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("beta", "gamma"), [(2.0, 1.0), (0.5, 0.0), (10.0, 3.0)])
def test_simpo_equals_autograd_of_the_textbook(beta, gamma, seed):
    policy, _ = draw(seed)
    chosen, rejected = gather_means(policy)
    expected = differentiate(policy, -functional.logsigmoid(beta * chosen - beta * rejected - gamma).mean())
    ours = run_ours(compute_simpo_terms, policy, beta=beta, gamma=gamma)
    assert_same(ours, expected)
    assert ours[2]["preference/margin"] == pytest.approx(beta * (chosen - rejected).mean().item())


def test_simpo_golden_values():
    """Mean logprobs -1 and -2: -log sigmoid(2 - 1); the gradient is split over the tokens of each completion."""
    policy = [torch.tensor(row, dtype=torch.float64) for row in ([-0.5, -1.5], [-2.0])]
    loss, gradient, metrics = run_ours(compute_simpo_terms, policy, [1, -1], [0, 0])
    assert loss == pytest.approx(np.log1p(np.exp(-1)))
    slope = 2 / (1 + np.e)
    assert gradient.tolist() == pytest.approx([-slope / 2, -slope / 2, slope])
    assert metrics == {
        "preference/num_pairs": 1.0,
        "preference/accuracy": 1.0,
        "preference/margin": pytest.approx(2.0),
        "preference/chosen_logprob": pytest.approx(-1.0),
        "preference/rejected_logprob": pytest.approx(-2.0),
    }


@pytest.mark.parametrize("compute", [compute_orpo_terms, compute_simpo_terms])
def test_completions_without_partner_are_not_trained(compute):
    policy, _ = draw()
    alone = run_ours(compute, policy, DPO_LABELS, [0, 0, 1, 2, 3, 4])
    pair = run_ours(compute, policy[:2], DPO_LABELS[:2], [0, 0])
    assert alone[0] == pytest.approx(pair[0])
    torch.testing.assert_close(alone[1][: sum(LENGTHS[:2])], pair[1])
    assert alone[1][sum(LENGTHS[:2]) :].abs().max() == 0
    loss, gradient, metrics = run_ours(compute, policy[:1], [1], [0])
    assert (loss, gradient.abs().sum(), metrics) == (0, 0, {"preference/num_pairs": 0.0})
    assert run_ours(compute, [torch.zeros(0)], [1], [0])[0] == 0


@pytest.mark.parametrize("compute", [compute_orpo_terms, compute_simpo_terms])
@pytest.mark.parametrize(("chosen", "rejected"), [(0.0, -1e5), (-1e5, 0.0), (0.0, 0.0), (-1e-9, -1e-9)])
def test_certain_and_impossible_completions_have_finite_gradients(compute, chosen, rejected):
    policy = [torch.tensor([value], dtype=torch.float64) for value in (chosen, rejected)]
    loss, gradient, _ = run_ours(compute, policy, [1, -1], [0, 0])
    assert np.isfinite(loss) and gradient.isfinite().all()


def test_orpo_equals_trl():
    """The odds ratio term in TRL's float32; TRL's first term covers prompts too and is left out."""
    peer = pytest.importorskip("trl.experimental.orpo.orpo_trainer")
    policy, _ = draw(1)
    weighted = peer.ORPOTrainer.odds_ratio_loss(PeerTrainer(beta=0.4), *gather_means(policy))[0]
    expected = differentiate(policy, -weighted.mean())
    whole, without = (run_ours(compute_orpo_terms, policy, odds_coef=coef) for coef in (0.4, 0.0))
    assert whole[0] - without[0] == pytest.approx(expected[0], rel=1e-5)
    torch.testing.assert_close(whole[1] - without[1], expected[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("gamma", [0.0, 1.6])
def test_simpo_equals_trl(gamma):
    peer = pytest.importorskip("trl.experimental.cpo.cpo_trainer")
    policy, _ = draw(1)
    trainer = PeerTrainer(loss_type="simpo", beta=2.5, simpo_gamma=gamma, alpha=0.0, label_smoothing=0.0)
    losses = peer.CPOTrainer.cpo_loss(trainer, *gather_means(policy))[0]
    assert_same(run_ours(compute_simpo_terms, policy, beta=2.5, gamma=gamma), differentiate(policy, losses.mean()))


def test_conservative_dpo_equals_trl():
    """TRL's CPO trainer has the smoothed loss; on log-ratios to the reference it is that of conservative DPO."""
    peer = pytest.importorskip("trl.experimental.cpo.cpo_trainer")
    policy, reference = draw(1)
    ratios = torch.stack([row.sum() - ref.sum() for row, ref in zip(policy, reference, strict=True)])
    trainer = PeerTrainer(loss_type="sigmoid", beta=0.3, alpha=0.0, label_smoothing=0.1)
    losses = peer.CPOTrainer.cpo_loss(trainer, ratios[CHOSEN], ratios[REJECTED])[0]
    ours = run_with_reference(
        compute_dpo_terms, policy, reference, DPO_LABELS, DPO_GROUPS, beta=0.3, label_smoothing=0.1
    )
    assert_same(ours, differentiate(policy, losses.mean()))
