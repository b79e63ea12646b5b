"""Sequence terms and importance corrections against numbers worked by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from token_batches import build_scores
from tunesmith.algorithms.sequence_terms import (
    compute_correction_weights,
    compute_gmpo_terms,
    compute_m2po_terms,
    compute_ratios,
    compute_rloo_terms,
    compute_sequence_ratio_terms,
    compute_topr_terms,
    compute_vespo_terms,
)
from tunesmith.config import CorrectionSection, MaskSection


def test_sequence_ratio_is_a_mean_over_its_tokens():
    scores = build_scores([[1, 1], [1]], old=[[-1, -2], [-3]], logprobs=[[-1.5, -1], [-2]])
    np.testing.assert_allclose(compute_sequence_ratio_terms(scores).sequence_log_ratios_E, [0.25, 0.25, 1.0])
    assert compute_sequence_ratio_terms(build_scores([[1]])).sequence_log_ratios_E is None


def test_gmpo_clips_each_token_before_the_mean():
    """A > 0 is clipped above only, A < 0 below only."""
    scores = build_scores([[1, 1, 1], [-1, -1]], logprobs=[[0.7, -0.9, 0.1], [-0.7, 0.9]])
    terms = compute_gmpo_terms(scores)
    np.testing.assert_allclose(terms.sequence_log_ratios_E, [(0.4 - 0.9 + 0.1) / 3] * 3 + [(-0.4 + 0.9) / 2] * 2)
    assert terms.is_selected_E.tolist() == [True, False, False, True, False]
    wide = compute_gmpo_terms(scores, clip_range_low=0.8, clip_range_high=0.5)
    np.testing.assert_allclose(wide.sequence_log_ratios_E, [(0.5 - 0.9 + 0.1) / 3] * 3 + [0.1] * 2)


def test_vespo_weights_whole_sequences():
    """W is e^.5, e^-.5 and e^-.5: W^2 e^(3 (1 - W)) for A >= 0, W^3 e^(2 (1 - W)) for A < 0."""
    scores = build_scores([[1, 1], [0], [-1]], logprobs=[[0.7, -0.2], [-0.5], [-0.5]])
    high, low = np.exp(0.5), np.exp(-0.5)
    gain, same, loss = high**2 * np.exp(3 * (1 - high)), low**2 * np.exp(3 * (1 - low)), low**3 * np.exp(2 * (1 - low))
    terms = compute_vespo_terms(scores)
    np.testing.assert_allclose(terms.correction_E, [gain, gain, same, loss])
    assert loss < same and terms.metrics == {"train/vespo_weight": pytest.approx((2 * gain + same + loss) / 4)}
    args = {"exponent_pos": 1.0, "decay_pos": 2.0, "exponent_neg": 3.0, "decay_neg": 1.0}
    expected = [high * np.exp(2 * (1 - high))] * 2 + [low * np.exp(2 * (1 - low)), low**3 * np.exp(1 - low)]
    np.testing.assert_allclose(compute_vespo_terms(scores, **args).correction_E, expected)


def test_vespo_weights_are_one_on_policy_and_vanish_far_from_it():
    far = build_scores([[1], [-1], [1], [-1], [1]], logprobs=[[0.0], [0.0], [50.0], [50.0], [-50.0]])
    np.testing.assert_allclose(compute_vespo_terms(far).correction_E, [1, 1, 0, 0, 0], atol=1e-15)


def test_topr_truncates_ratios_of_negative_tokens():
    scores = build_scores(
        [[1, 1], [-1, -1], [-1], [0]], old=[[-1, -1], [-1, -1], [-1], [-1]],
        logprobs=[[-3, -3], [-1.5, -2.0], [-0.5], [-2]],
    )  # fmt: skip
    expected = [1, 1, np.exp(-1.5), np.exp(-1.5), 1, np.exp(-1)]
    np.testing.assert_allclose(compute_topr_terms(scores).correction_E, expected)
    by_token = compute_topr_terms(scores, ratio_level="token").correction_E
    np.testing.assert_allclose(by_token, [1, 1, np.exp(-0.5), np.exp(-1), 1, np.exp(-1)])
    np.testing.assert_allclose(compute_topr_terms(scores, advantage_threshold=-0.5).correction_E[-1], 1)


def test_m2po_masks_the_largest_log_ratios():
    """A clip could stop the first three tokens only: d^2 = .01, .04, .25; the mean of two is .025."""
    scores = build_scores([[1, 1, 1], [-1], [1]], logprobs=[[0.1, 0.2, 0.5], [0.9], [-0.9]])
    terms = compute_m2po_terms(scores)
    np.testing.assert_array_equal(terms.correction_E, [1, 1, 0, 1, 1])
    assert terms.metrics["train/m2po_masked_frac"] == pytest.approx(0.2)
    assert compute_m2po_terms(scores, second_moment_cap=1.0).correction_E.all()
    assert compute_m2po_terms(build_scores([], logprobs=[])).correction_E.size == 0


def test_rloo_subtracts_the_kl_from_the_reward():
    """Equal to leave-one-out advantages of the rewards R - coef KL."""
    kl = [0.5, 0.3, 1.0]
    reference = [[-1.3, -1.2], [-1.3], [-2.0]]
    scores = build_scores(
        [[0.1, 0.1], [0.2], [0.0]], old=[[-1, -1], [-1], [-1]], groups=[4, 4, 7], reference_logprobs=reference
    )
    terms = compute_rloo_terms(scores, reward_kl_coef=0.5)
    np.testing.assert_allclose(terms.advantages_E, [0.0, 0.0, 0.3, 0.0], atol=1e-12)
    assert terms.metrics["train/reward_kl"] == pytest.approx(np.mean(kl))
    assert (compute_rloo_terms(scores).advantages_E == scores.advantages_E).all()


SAMPLER = [[-1.5, -0.9], [-1.0], [-3.0]]


def correct(*, is_weighted: bool = True, experts=None, **section) -> tuple[np.ndarray, dict[str, float]]:
    """The proximal policy has logprob -1 at every token; ratios are e^.5, e^-.1; 1; e^2."""
    scores = build_scores(
        [[1, 1], [-1], [-1]], old=[[-1, -1], [-1], [-1]], logprobs=[[-1, -1], [-1.2], [-3]], experts=experts
    )
    sampler_E = np.concatenate([np.asarray(row) for row in SAMPLER])
    return compute_correction_weights(
        replace(scores, sampler_logprobs_E=sampler_E), CorrectionSection(**section), is_weighted=is_weighted
    )


def test_importance_weights_are_truncated_by_token_or_by_sequence():
    weights, metrics = correct()
    np.testing.assert_allclose(weights, [np.exp(0.5), np.exp(-0.1), 1, 2])
    assert metrics == pytest.approx({"correction/mean_weight": weights.mean(), "correction/truncated_frac": 0.25})
    weights, _ = correct(importance="sequence", cap=5.0)
    np.testing.assert_allclose(weights, [np.exp(0.4), np.exp(0.4), 1, 5])


def test_importance_weights_have_a_lower_bound():
    """Ratios e^.5, e^-.1 = .905, 1 and e^2."""
    weights, metrics = correct(floor=0.95)
    np.testing.assert_allclose(weights, [np.exp(0.5), 0.95, 1, 2])
    assert metrics["correction/raised_frac"] == 0.25 and metrics["correction/truncated_frac"] == 0.25
    assert correct(floor=0.9)[1]["correction/raised_frac"] == 0
    mask = MaskSection(level="token", low=0.95, high=10.0)
    np.testing.assert_allclose(correct(floor=0.95, mask=mask)[0], [np.exp(0.5), 0, 1, 2])


def test_masks_by_token_sequence_and_geometric_mean():
    def mask(level, low, high):
        section = {"importance": "none", "mask": MaskSection(level=level, low=low, high=high)}
        return correct(is_weighted=False, **section)[0].tolist()

    assert mask("token", 0.95, 1.7) == [1, 0, 1, 0]
    assert mask("sequence", 0.5, 1.3) == [0, 0, 1, 0]
    assert mask("geometric", 0.5, 1.3) == [1, 1, 1, 0]


def test_negative_tokens_of_off_policy_sequences_are_masked():
    """Mean of sampler - now: (-.5 + .1) / 2 with A > 0; .2; 0."""
    weights, metrics = correct(is_weighted=False, negative_sequence_delta=0.1)
    assert weights.tolist() == [1, 1, 0, 1]
    assert metrics == {"correction/masked_frac": pytest.approx(0.25)}


def mask_negative(advantages: list[list[float]], *, delta: float = 0.1, **section) -> list[float]:
    """The sampler is 0.5 nats above the policy at the tokens of the first sequence, equal at the second."""
    old, logprobs = [[-1.0, -1.0], [-1.0]], [[-1.5, -1.5], [-1.0]]
    scores = build_scores([[1, 1], [1]], old=old, logprobs=logprobs)
    weights, _ = compute_correction_weights(
        replace(
            scores,
            advantages_E=np.concatenate([np.asarray(row, dtype=np.float64) for row in advantages]),
            proximal_logprobs_E=np.asarray([-1.0, 1.0, -1.0]),
        ),
        CorrectionSection(importance="none", negative_sequence_delta=delta, **section),
        is_weighted=False,
    )
    return weights.tolist()


def test_off_policy_sequences_are_masked_by_the_mean_of_their_advantages():
    """Not by the reward, which is positive, and not token by token."""
    assert mask_negative([[-3.0, 1.0], [-1.0]]) == [0, 0, 1]
    assert mask_negative([[-1.0, 3.0], [-1.0]]) == [1, 1, 1]
    assert mask_negative([[-1.0, 1.0], [-1.0]]) == [1, 1, 1]
    assert mask_negative([[0.3, -(0.1 + 0.2)], [-1.0]]) == [1, 1, 1], "0 but for rounding"
    assert mask_negative([[-1.0, -1.0], [-1.0]], delta=0.0) == [0, 0, 1]
    assert mask_negative([[-1.0, -1.0], [-1.0]], delta=0.5) == [1, 1, 1]


def test_both_masks_apply_together():
    """Token 1 is out of the bounds of the mask; the sequence of tokens 0 and 1 is off-policy."""
    mask = MaskSection(level="token", low=0.5, high=2.0)
    assert mask_negative([[1.0, 1.0], [1.0]], mask=mask) == [1, 0, 1]
    assert mask_negative([[-1.0, -1.0], [1.0]], mask=mask) == [0, 0, 1]


def test_bounds_and_cap_include_their_limits():
    """Ratios of exactly 1 are within limits of 1 and not counted as truncated by a cap of 1."""
    scores = build_scores([[1, 1]], old=[[-1, -2]])

    def compute(*, is_weighted: bool, **section):
        return compute_correction_weights(scores, CorrectionSection(**section), is_weighted=is_weighted)

    for low, high in ((1.0, 2.0), (0.5, 1.0)):
        mask = MaskSection(level="token", low=low, high=high)
        assert compute(is_weighted=False, importance="none", mask=mask)[0].tolist() == [1, 1]
    assert compute(is_weighted=True, cap=1.0)[1]["correction/truncated_frac"] == 0


def test_ratios_of_extreme_differences_are_bounded():
    scores = build_scores([[1], [1]])
    np.testing.assert_allclose(
        compute_ratios(np.asarray([1e4, -1e4]), scores, level="token"), [np.exp(20.0), np.exp(-20.0)], rtol=1e-12
    )


def test_without_corrections_all_factors_are_one():
    weights, metrics = correct(is_weighted=False)
    assert (weights == 1).all() and metrics == {}
    assert correct(experts=[True, True, True])[0].tolist() == [1, 1, 1, 1]


def test_untruncated_sequence_weights_are_unbiased():
    """The sampler's mean of weight times any function of sequences is the policy's mean of that function."""
    rng = np.random.default_rng(0)
    policy, sampler = rng.dirichlet(np.ones(3), size=2)
    values = rng.standard_normal((3, 3))
    total = 0.0
    for first in range(3):
        for second in range(3):
            scores = build_scores([[1, 1]], old=[np.log(policy[[first, second]])])
            section = CorrectionSection(importance="sequence", cap=1e9)
            weights, _ = compute_correction_weights(
                replace(scores, sampler_logprobs_E=np.log(sampler[[first, second]])), section, is_weighted=True
            )
            total += sampler[first] * sampler[second] * weights[0] * values[first, second]
    assert total == pytest.approx(policy @ values @ policy)
