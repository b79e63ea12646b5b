"""AEPO's advantages and clip against numbers worked by hand, and the gradient of every case."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from token_batches import build_scores
from tunesmith.algorithms.losses.policy import compute_aepo_losses, compute_aepo_terms, compute_ppo_clip_losses
from tunesmith.algorithms.scores import TokenScores


def test_advantages_grow_with_the_entropy_by_hand():
    """Entropies 1, 1, 3, 3 have mean 2 and standard deviation 1, so z is -1, -1, 1, 1."""
    scores = build_scores([[2.0, -1.0], [2.0, -1.0]], entropies=[[1.0, 1.0], [3.0, 3.0]])
    terms = compute_aepo_terms(scores)
    np.testing.assert_allclose(terms.advantages_E, [1.6, -0.8, 2.4, -1.2])
    assert terms.is_selected_E.tolist() == [False, False, True, True]
    assert terms.metrics == {"train/entropy_selected_frac": 0.5}
    assert terms.correction_E is None


def test_no_advantage_changes_its_sign_and_coefficient_0_keeps_all():
    scores = build_scores([[1.0, -1.0]], entropies=[[0.0, 2.0]])
    np.testing.assert_allclose(compute_aepo_terms(scores, entropy_advantage_coef=3.0).advantages_E, [0.0, -4.0])
    np.testing.assert_allclose(compute_aepo_terms(scores, entropy_advantage_coef=0.0).advantages_E, [1.0, -1.0])


def test_equal_entropies_change_nothing():
    terms = compute_aepo_terms(build_scores([[1.0, -1.0]], entropies=[[0.5, 0.5]]))
    np.testing.assert_allclose(terms.advantages_E, [1.0, -1.0])
    assert not terms.is_selected_E.any()


def differentiate(ratio: float, advantage: float, *, is_selected: bool, compute=compute_aepo_losses):
    """Loss of a token, and the derivative of the loss by its logprob."""
    logprob = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    scores = TokenScores(
        logprobs_N=logprob,
        old_logprobs_N=torch.tensor([-1.0], dtype=torch.float64),
        advantages_N=torch.tensor([advantage], dtype=torch.float64),
        is_selected_N=torch.tensor([float(is_selected)], dtype=torch.float64),
    )
    losses = compute(scores)
    losses.losses_N.sum().backward()
    return losses.losses_N.item(), logprob.grad.item(), losses.metrics


@pytest.mark.parametrize(
    ("ratio", "advantage", "is_selected", "loss", "gradient"),
    [
        (1.1, 2.0, True, -2.2, -2.2),  # inside the clip
        (1.5, 2.0, False, -2.4, 0.0),  # PPO stops the gradient
        (1.5, 2.0, True, -2.4, -2.4),  # the value of the clip, the gradient of 1.2 A log p
        (0.5, 2.0, True, -1.0, -1.0),
        (0.5, -2.0, True, 1.6, 0.0),  # the lower clip is unchanged
        (1.5, -2.0, True, 3.0, 3.0),
        (4.0, -2.0, True, 6.0, 0.0),  # the dual clip is unchanged
    ],
)
def test_clip_by_hand(ratio, advantage, is_selected, loss, gradient):
    found = differentiate(ratio, advantage, is_selected=is_selected)
    assert found[:2] == (pytest.approx(loss), pytest.approx(gradient))
    assert found[2]["entropy_kept_frac"].item() == float(is_selected and advantage > 0 and ratio > 1.2)


@pytest.mark.parametrize("ratio", [0.3, 0.9, 1.1, 1.4, 5.0])
@pytest.mark.parametrize("advantage", [-1.5, 1.5])
def test_tokens_that_are_not_selected_have_ppos_loss(ratio, advantage):
    found = differentiate(ratio, advantage, is_selected=False)
    assert found[:2] == differentiate(ratio, advantage, is_selected=False, compute=compute_ppo_clip_losses)[:2]
