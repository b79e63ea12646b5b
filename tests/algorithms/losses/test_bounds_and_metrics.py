"""Where the bounds of losses and guards of estimates lie, on both sides of each, and the metrics that count them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from token_batches import build_scores
from tunesmith.algorithms.advantages.group import RunOutcome, compute_bnpo_advantages, fit_beta
from tunesmith.algorithms.advantages.returns import compute_gae, compute_ppo_terms, compute_reinforce_plus_plus_terms
from tunesmith.algorithms.losses.policy import (
    compute_aepo_terms,
    compute_chord_losses,
    compute_chord_terms,
    compute_cispo_losses,
    compute_gspo_losses,
    compute_mix_losses,
    compute_mix_terms,
    compute_rec_losses,
    compute_sapo_losses,
    compute_sppo_losses,
)
from tunesmith.algorithms.losses.preference import compute_kto_terms
from tunesmith.algorithms.scores import TokenScores
from tunesmith.algorithms.sequence_terms import (
    compute_clip_cov_terms,
    compute_kl_cov_terms,
    compute_m2po_terms,
    compute_rloo_terms,
    compute_topr_terms,
    find_top_entropy_tokens,
)
from tunesmith.metric import Mean


def run(compute, ratios, advantage, **args):
    """Gradients by logprob over -A, and the metrics, at tokens of these ratios, each its own sequence."""
    ratio_N = torch.tensor(ratios, dtype=torch.float64)
    logprobs_N = torch.full_like(ratio_N, -1.0).requires_grad_()
    losses = compute(
        TokenScores(
            logprobs_N=logprobs_N, old_logprobs_N=-1.0 - ratio_N.log(),
            advantages_N=torch.full_like(ratio_N, advantage), sequence_log_ratios_N=ratio_N.log(),
        ),
        **args,
    )  # fmt: skip
    losses.losses_N.sum().backward()
    gradients = (-logprobs_N.grad / advantage) if advantage else logprobs_N.grad
    return gradients.tolist(), {name: values.tolist() for name, values in losses.metrics.items()}


@pytest.mark.parametrize(("advantage", "exponent"), [(1.5, 15.0), (3.0, 20.0), (-3.0, -20.0)])
def test_the_weight_of_a_large_advantage_is_bounded(advantage, exponent):
    """exp(30) times a batch would still fit into float32; a reward of 10 at this temperature would not."""
    gradients, _ = run(compute_rec_losses, [1.0], advantage, weight="advantage", temp=0.1)
    assert gradients == [pytest.approx(math.exp(exponent))]


def test_cispo_masks_positive_tokens_above_and_negative_tokens_below_the_bounds():
    args = {"clip_range_high": 9.0, "enable_mask_clip": True, "mask_clip_range_low": 0.5, "mask_clip_range_high": 0.3}
    ratios = [0.4, 0.6, 0.8, 1.1, 1.25, 1.35, 1.6]
    gains, _ = run(compute_cispo_losses, ratios, 2.0, **args)
    assert gains == pytest.approx([0.4, 0.6, 0.8, 1.1, 1.25, 0.0, 0.0])
    losses, _ = run(compute_cispo_losses, ratios, -2.0, **args)
    assert losses == pytest.approx([0.0, 0.6, 0.8, 1.1, 1.25, 1.35, 1.6])


def test_cispo_counts_clipped_weights():
    pushes, metrics = run(compute_cispo_losses, [0.1, 1.0, 1.2, 1.4], 1.0)
    assert pushes == pytest.approx([0.1, 1.0, 1.2, 1.28])
    assert metrics == {"clip_frac": [0.0, 0.0, 0.0, 1.0]}
    both = run(compute_cispo_losses, [0.1, 1.0, 1.4], -1.0, clip_range_low=0.5)
    assert both[0] == pytest.approx([0.5, 1.0, 1.28]) and both[1] == {"clip_frac": [1.0, 0.0, 1.0]}


@pytest.mark.parametrize(("advantage", "stopped"), [(1.0, [0.0, 0.0, 1.0]), (-1.0, [1.0, 0.0, 0.0])])
def test_gspo_counts_tokens_of_clipped_sequences(advantage, stopped):
    pushes, metrics = run(compute_gspo_losses, [0.999, 1.0, 1.001], advantage)
    assert metrics == {"clip_frac": stopped}
    assert [push == 0 for push in pushes] == [bool(each) for each in stopped]


def test_sppo_counts_tokens_out_of_bounds():
    pushes, metrics = run(compute_sppo_losses, [0.7, 0.8, 1.25, 1.35], 1.0)
    assert pushes == [0.0, 1.0, 1.0, 0.0]
    assert metrics == {"clip_frac": [1.0, 0.0, 0.0, 1.0]}


@pytest.mark.parametrize(
    ("clip_mode", "advantage", "kept"),
    [
        ("none", 1.0, [1, 1, 1, 1, 1, 1]),
        ("one-side", 1.0, [1, 1, 1, 1, 0, 0]),
        ("one-side", -1.0, [0, 0, 1, 1, 1, 1]),
        ("gspo-one-side", -1.0, [0, 0, 1, 1, 1, 1]),
        ("two-side", 1.0, [0, 0, 1, 1, 0, 0]),
        ("ring", 1.0, [1, 0, 1, 1, 0, 0]),
        ("ring", -1.0, [0, 0, 1, 1, 0, 1]),
    ],
)
def test_rec_counts_masked_tokens(clip_mode, advantage, kept):
    pushes, metrics = run(compute_rec_losses, [0.3, 0.5, 0.9, 1.1, 1.5, 3.5], advantage, clip_mode=clip_mode)
    assert pushes == kept
    assert metrics == {"clip_frac": [1.0 - each for each in kept]}


def test_zero_advantage_has_no_gradient_at_any_ratio():
    for compute in (compute_cispo_losses, compute_gspo_losses, compute_sapo_losses, compute_sppo_losses):
        assert run(compute, [0.5, 1.0, 2.0], 0.0)[0] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("compute", [compute_mix_losses, compute_chord_losses])
def test_mixtures_clip_sampled_tokens_like_ppo(compute):
    pushes, _ = run(compute, [0.5, 1.1, 1.3], 1.0)
    assert pushes == pytest.approx([0.5, 1.1, 0.0])
    pushes, _ = run(compute, [0.7, 0.9, 2.9, 3.1], -1.0)
    assert pushes == pytest.approx([0.0, 0.9, 2.9, 0.0])
    pushes, _ = run(compute, [0.7, 1.3], 1.0, clip_range_high=0.4)
    assert pushes == pytest.approx([0.7, 1.3])
    pushes, _ = run(compute, [0.7, 1.3], -1.0, clip_range_low=0.4)
    assert pushes == pytest.approx([0.7, 1.3])


@pytest.mark.parametrize("compute", [compute_mix_terms, compute_chord_terms])
@pytest.mark.parametrize("step", [0, 1, 7])
def test_mixtures_weight_experts_by_a_tenth_by_default(compute, step):
    terms = compute(build_scores([[1.0], [1.0, 1.0]], experts=[False, True], step=step))
    assert terms.correction_E == pytest.approx([0.9, 0.1, 0.1])


def test_kto_metrics():
    """Log-ratios 2, 4 (desirable), -3 (undesirable) and 1 (a probe), beta 0.5."""
    labels = [[1.0], [1.0, 1.0], [-1.0], [0.0]]
    scores = build_scores(
        labels, logprobs=[[-1], [-1, -1], [-4], [-2]], reference_logprobs=[[-3], [-3, -3], [-1], [-3]]
    )
    metrics = compute_kto_terms(scores, beta=0.5).metrics
    assert metrics == {
        "preference/num_desirable": 2,
        "preference/num_undesirable": 1,
        "preference/reference_point": 1.0,
        "preference/desirable_reward": pytest.approx(1.5),
        "preference/undesirable_reward": pytest.approx(-1.5),
    }
    only_good = build_scores([[1.0]], logprobs=[[-1]], reference_logprobs=[[-3]])
    assert "preference/undesirable_reward" not in compute_kto_terms(only_good).metrics


def outcomes(*groups):
    return [[RunOutcome(reward=reward, num_turns=1, turn_logprobs=((-1.0,),)) for reward in group] for group in groups]


def test_fit_beta_without_a_fit_is_zero():
    assert fit_beta([]) == fit_beta([0.3]) == (0.0, 0.0)
    assert fit_beta([0.5, 0.5]) == (0.0, 0.0), "no variance"
    assert fit_beta([0.0, 1.0]) == (0.0, 0.0), "as much variance as a coin, which is no Beta distribution"
    assert fit_beta([0.25, 0.75]) == pytest.approx((1.5, 1.5))
    mean, variance = 0.1, 0.0025
    size = mean * (1 - mean) / variance - 1
    assert fit_beta([0.05, 0.15]) == pytest.approx((size * mean, size * (1 - mean)))
    assert fit_beta([0.0, 0.0, 1.0, 0.9]) != (0.0, 0.0)
    assert fit_beta([0.0, 0.0, 0.0, 1.0]) == (0.0, 0.0)


@pytest.mark.parametrize("others", [[1, 1], [0, 0]])
def test_bnpo_without_a_fit_only_subtracts_the_mean(others):
    """Means of 1/2 and 1, or of 1/2 and 0: these do fit; equal means do not."""
    unfitted = compute_bnpo_advantages(outcomes([1, 0], [0, 1]))
    assert unfitted == [[0.5, -0.5], [-0.5, 0.5]]
    fitted = compute_bnpo_advantages(outcomes([1, 0], others))
    a, b = fit_beta([0.5, others[0]])
    density = math.exp(
        a / 3 * math.log(0.5) + b / 3 * math.log(0.5)
        - (math.lgamma(1 + a / 3) + math.lgamma(1 + b / 3) - math.lgamma(2 + a / 3 + b / 3))
    )  # fmt: skip
    assert fitted[0] == pytest.approx([0.5 / density, -0.5 / density]) and fitted[1] == [None, None]


@pytest.mark.parametrize(
    ("rewards", "is_refused"), [([0, 1.5], True), ([-0.1, 1], True), ([1, 1], False), ([0, 0], False)]
)
def test_bnpo_accepts_rewards_from_zero_to_one_only(rewards, is_refused):
    if is_refused:
        with pytest.raises(ValueError, match="rewards from 0 to 1"):
            compute_bnpo_advantages(outcomes(rewards))
    else:
        assert compute_bnpo_advantages(outcomes(rewards)) == [[None, None]]


def test_m2po_caps_the_mean_of_squared_log_ratios():
    """d = -.1, -.3 where A < 0: the squares' means are .01 and .05, so only the first stays under .04."""
    scores = build_scores([[-1, -1, 1]], old=[[-1, -1, -1]], logprobs=[[-1.1, -1.3, -2.0]])
    terms = compute_m2po_terms(scores)
    assert terms.correction_E.tolist() == [1.0, 0.0, 1.0]
    assert terms.advantages_E.tolist() == [-1, -1, 1]
    assert compute_m2po_terms(scores, second_moment_cap=0.051).correction_E.all()
    assert compute_m2po_terms(build_scores([], logprobs=[])).metrics == {"train/m2po_masked_frac": 0.0}


def test_rloo_subtracts_the_mean_kl_of_the_other_runs():
    """KLs 1, 2, 6 in one group, and 5 in a group of one."""
    scores = build_scores(
        [[0.0], [0.0], [0.0], [0.0]], groups=[0, 0, 0, 1], old=[[-1], [-1], [-1], [-1]],
        reference_logprobs=[[-2], [-3], [-7], [-6]],
    )  # fmt: skip
    terms = compute_rloo_terms(scores, reward_kl_coef=0.1)
    assert terms.advantages_E == pytest.approx([-0.1 * (1 - 4), -0.1 * (2 - 3.5), -0.1 * (6 - 1.5), 0.0])
    assert terms.correction_E is None
    assert terms.metrics == {"train/reward_kl": pytest.approx(3.5)}
    assert compute_rloo_terms(scores).metrics == {}


def test_weighting_terms_keep_the_advantages():
    scores = build_scores([[0.5, -0.5]], logprobs=[[-1, -1]], old=[[-1, -1]])
    assert compute_topr_terms(scores).advantages_E.tolist() == [0.5, -0.5]
    assert compute_reinforce_plus_plus_terms(scores).correction_E is None


def test_gae_has_no_value_after_the_last_token():
    """gamma 1, lambda 1: the advantage of each token is the reward still to come minus its value."""
    sequence_E = np.array([0, 0, 1])
    advantages_E = compute_gae(np.array([0.0, 1.0, 2.0]), np.array([0.5, 0.25, 4.0]), sequence_E, gamma=1.0, lam=1.0)
    assert advantages_E == pytest.approx([0.5, 0.75, -2.0])


def test_critic_metrics_are_means_over_tokens():
    scores = build_scores([[1.0], [3.0]], values=[[0.5], [2.5]])
    metrics = compute_ppo_terms(scores).metrics
    assert metrics["critic/value_mean"] == pytest.approx(1.5)
    assert metrics["critic/return_mean"] == pytest.approx(2.0)
    assert metrics["critic/explained_variance"] == pytest.approx(1.0)


def test_shares_of_tokens_are_weighed_by_the_tokens_of_the_update():
    scores = build_scores(
        [[1.0, -1.0], [2.0]], old=[[-1, -1], [-1]], logprobs=[[-0.5, -1.5], [-2.0]], entropies=[[0.1, 0.9], [0.5]]
    )
    metrics = find_top_entropy_tokens(scores, fraction=0.5)[1]
    for compute in (compute_m2po_terms, compute_clip_cov_terms, compute_kl_cov_terms, compute_aepo_terms):
        metrics |= compute(scores).metrics
    del metrics["train/entropy_threshold"]
    assert {type(value) for value in metrics.values()} == {Mean} and len(metrics) == 5
    assert {value.num_observations for value in metrics.values()} == {3}
