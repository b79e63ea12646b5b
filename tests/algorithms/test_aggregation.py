"""Token weights against the aggregation formulas over a masked matrix."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tunesmith.algorithms.losses.policy import compute_ppo_clip_losses
from tunesmith.algorithms.scores import TokenScores, compute_token_weights


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", [1 / 4] * 4),
        ("seq-mean-token-sum", [1 / 2] * 4),
        ("seq-mean-token-mean", [1 / 6, 1 / 2, 1 / 6, 1 / 6]),
        ("seq-mean-token-sum-norm", [1 / 20] * 4),
    ],
)
def test_weights_by_hand(aggregation, expected):
    weights = compute_token_weights(np.array([7, 3, 7, 7]), aggregation=aggregation, norm_length=10)
    np.testing.assert_allclose(weights, expected)


def test_no_tokens_give_no_weights():
    assert compute_token_weights(np.zeros(0, dtype=np.int64), aggregation="token-mean", norm_length=1).size == 0


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token-mean", 0.26889560), ("seq-mean-token-sum", 2.58139801), ("seq-mean-token-mean", 0.24904862)],
)
def test_weighted_ppo_losses_equal_the_golden_values(aggregation, expected):
    torch.manual_seed(42)
    logprobs, old, _ = (2 * torch.rand(5, 20) - 1 for _ in range(3))
    mask, advantages = torch.rand(5, 20) > 0.5, 2 * torch.rand(5, 20) - 1
    scores = TokenScores(logprobs_N=logprobs[mask], old_logprobs_N=old[mask], advantages_N=advantages[mask])
    rows = torch.arange(5)[:, None].expand(5, 20)[mask].numpy()
    weights = compute_token_weights(rows, aggregation=aggregation, norm_length=20)
    loss = (torch.from_numpy(weights) * compute_ppo_clip_losses(scores).losses_N).sum()
    assert loss.item() == pytest.approx(expected, abs=1e-6)
