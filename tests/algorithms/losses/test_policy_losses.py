"""Ratio and REINFORCE losses against golden values and against their formulas for one token."""

from __future__ import annotations

import math

import pytest
import torch

from tunesmith.algorithms.losses.policy import (
    compute_cispo_losses,
    compute_gspo_losses,
    compute_importance_sampling_losses,
    compute_opmd_losses,
    compute_rec_losses,
    compute_reinforce_losses,
    compute_sapo_losses,
    compute_sppo_losses,
)
from tunesmith.algorithms.scores import TokenScores, compute_token_weights


def build_golden():
    """The seed and the order of draws that the golden values were made with."""
    torch.manual_seed(42)
    logprobs, old, _ = (2 * torch.rand(5, 20) - 1 for _ in range(3))
    mask, advantages = torch.rand(5, 20) > 0.5, 2 * torch.rand(5, 20) - 1
    return logprobs.requires_grad_(), old, mask, advantages


def weigh(mask: torch.Tensor, aggregation: str) -> torch.Tensor:
    rows = torch.arange(5)[:, None].expand(5, 20)[mask].numpy()
    return torch.from_numpy(compute_token_weights(rows, aggregation=aggregation, norm_length=20)).float()


@pytest.mark.parametrize(
    ("compute", "aggregation", "loss", "norm"),
    [
        (compute_gspo_losses, "seq-mean-token-mean", 0.27235109, 0.09257731),
        (compute_opmd_losses, "token-mean", -0.00958995, 0.04118341),
        (compute_importance_sampling_losses, "token-mean", 0.10296655, 0.15888062),
    ],
)
def test_losses_equal_the_golden_values(compute, aggregation, loss, norm):
    logprobs, old, mask, advantages = build_golden()
    gaps = (logprobs.detach() - old) * mask
    means = (gaps.sum(1) / mask.sum(1))[:, None].expand(5, 20)
    scores = TokenScores(
        logprobs_N=logprobs[mask], old_logprobs_N=old[mask], advantages_N=advantages[mask],
        sequence_log_ratios_N=means[mask],
    )  # fmt: skip
    total = (weigh(mask, aggregation) * compute(scores).losses_N).sum()
    total.backward()
    assert total.item() == pytest.approx(loss, abs=1e-7)
    assert logprobs.grad.norm().item() == pytest.approx(norm, abs=1e-7)


def run_one(compute, logprob: float, advantage: float, *, mean_log_ratio: float = 0.0, **args) -> tuple[float, float]:
    """Loss and gradient of one token that was sampled with logprob -2."""
    x = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    old, advantages, means = torch.tensor([[-2.0], [advantage], [mean_log_ratio]], dtype=torch.float64)
    scores = TokenScores(logprobs_N=x, old_logprobs_N=old, advantages_N=advantages, sequence_log_ratios_N=means)
    loss = compute(scores, **args).losses_N.sum()
    loss.backward()
    return loss.item(), x.grad.item()


POINTS = [(logprob, advantage) for logprob in (-3.5, -2.1, -2.0, -1.9, -0.8) for advantage in (-1.5, 0.0, 0.7)]


@pytest.mark.parametrize(("logprob", "advantage"), POINTS)
def test_formulas_token_by_token(logprob, advantage):
    ratio = math.exp(logprob + 2)
    assert run_one(compute_reinforce_losses, logprob, advantage) == pytest.approx(
        (-advantage * min(ratio, 2) * logprob, -advantage * min(ratio, 2))
    )
    assert run_one(compute_reinforce_losses, logprob, advantage, ratio_cap=None) == pytest.approx(
        (-advantage * logprob, -advantage)
    )
    assert run_one(compute_importance_sampling_losses, logprob, advantage) == pytest.approx((-advantage * ratio,) * 2)
    assert run_one(compute_opmd_losses, logprob, advantage, tau=3.0) == pytest.approx(
        (-advantage * logprob / 4, -advantage / 4)
    )
    weight = min(ratio, 1.28)
    assert run_one(compute_cispo_losses, logprob, advantage) == pytest.approx(
        (-advantage * weight * logprob, -advantage * weight)
    )
    weight = min(max(ratio, 0.7), 1.1)
    assert run_one(compute_cispo_losses, logprob, advantage, clip_range_low=0.3, clip_range_high=0.1) == pytest.approx(
        (-advantage * weight * logprob, -advantage * weight)
    )
    tau = 1.0 if advantage > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    assert run_one(compute_sapo_losses, logprob, advantage) == pytest.approx(
        (-advantage * 4 / tau * gate, -advantage * 4 * gate * (1 - gate) * ratio), rel=1e-12
    )
    bound = math.log(1.3)
    assert run_one(compute_sppo_losses, logprob, advantage) == pytest.approx(
        (-advantage * min(max(logprob + 2, -bound), bound), -advantage if abs(logprob + 2) <= bound else 0.0)
    )


def test_sapo_has_the_policy_gradient_at_ratio_one():
    for advantage in (-1.0, 1.0):
        assert run_one(compute_sapo_losses, -2.0, advantage)[1] == pytest.approx(-advantage)


@pytest.mark.parametrize(
    ("logprob", "advantage", "is_stopped"),
    [(-1.0, 1.0, True), (-1.0, -1.0, False), (-3.0, 1.0, False), (-3.0, -1.0, True), (-3.0, 0.0, False)],
)
def test_cispo_mask_clip_masks_tokens_that_ppo_would_clip(logprob, advantage, is_stopped):
    args = {"enable_mask_clip": True, "mask_clip_range_low": 0.5, "mask_clip_range_high": 0.5}
    gradient = run_one(compute_cispo_losses, logprob, advantage, **args)[1]
    assert (gradient == 0) == (is_stopped or advantage == 0)


@pytest.mark.parametrize("mean_log_ratio", [-1e-3, -2e-4, 0.0, 3e-4, 1e-3])
@pytest.mark.parametrize("advantage", [-1.5, 0.7])
def test_gspo_clips_by_the_sequence_ratio(mean_log_ratio, advantage):
    ratio = math.exp(mean_log_ratio)
    is_clipped = ratio > 1 + 4e-4 if advantage > 0 else ratio < 1 - 3e-4
    loss, gradient = run_one(compute_gspo_losses, -1.0, advantage, mean_log_ratio=mean_log_ratio)
    assert gradient == pytest.approx(0.0 if is_clipped else -advantage * ratio)
    bound = 1 + 4e-4 if advantage > 0 else 1 - 3e-4
    assert loss == pytest.approx(-advantage * (bound if is_clipped else ratio))


def keeps(clip_mode: str, ratio: float, advantage: float) -> bool:
    """REC's rules by cases, with the default bounds .2, .2, .6, 2."""
    one_side = (advantage >= 0 and ratio <= 1.2) or (advantage <= 0 and ratio >= 0.8)
    two_side = 0.8 <= ratio <= 1.2
    ring = two_side or (advantage >= 0 and ratio <= 0.4) or (advantage <= 0 and ratio >= 3)
    return {"none": True, "one-side": one_side, "two-side": two_side, "ring": ring}[clip_mode]


@pytest.mark.parametrize("clip_mode", ["none", "one-side", "two-side", "ring"])
@pytest.mark.parametrize("weight", ["none", "importance_sampling", "advantage"])
def test_rec_masks_by_clip_mode(clip_mode, weight):
    for logprob in (-3.2, -2.4, -2.05, -1.9, -1.5, -0.5):
        for advantage in (-1.5, 0.7):
            ratio = math.exp(logprob + 2)
            factor = {"none": 1.0, "importance_sampling": ratio, "advantage": math.exp(advantage / 2)}[weight]
            expected = -advantage * factor * keeps(clip_mode, ratio, advantage)
            args = {"clip_mode": clip_mode, "weight": weight} | ({"temp": 2.0} if weight == "advantage" else {})
            found = run_one(compute_rec_losses, logprob, advantage, **args)
            assert found == pytest.approx((expected * logprob, expected))


def test_rec_with_sequence_ratios_and_regularizers():
    args = {"clip_mode": "gspo-one-side", "weight": "gspo_importance_sampling"}
    assert run_one(compute_rec_losses, -0.5, 1.0, mean_log_ratio=0.1, **args)[1] == pytest.approx(-math.exp(0.1))
    assert run_one(compute_rec_losses, -2.0, 1.0, mean_log_ratio=0.3, **args)[1] == 0
    k2 = {"regularizer": "k2", "regularizer_coef": 0.5}
    assert run_one(compute_rec_losses, -1.5, 1.0, **k2)[1] == pytest.approx(-1.0 + 0.5 * 2 * 0.5)
    forward = {"regularizer": "forward-kl", "regularizer_coef": 0.5}
    assert run_one(compute_rec_losses, -1.5, -1.0, **forward)[1] == pytest.approx(1.0 - 0.5)


@pytest.mark.parametrize(
    "compute",
    [
        compute_cispo_losses, compute_gspo_losses, compute_sapo_losses, compute_sppo_losses, compute_rec_losses,
        compute_importance_sampling_losses, compute_reinforce_losses,
    ],
)  # fmt: skip
def test_losses_are_finite_for_extreme_ratios(compute):
    for logprob, mean_log_ratio in ((0.0, 1e4), (-1e4, -1e4)):
        loss, gradient = run_one(compute, logprob, 1.0, mean_log_ratio=mean_log_ratio)
        assert math.isfinite(loss) and math.isfinite(gradient)
