"""Selections by covariance and by entropy, against numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from token_batches import build_scores
from tunesmith.algorithms.sequence_terms import (
    compute_clip_cov_terms,
    compute_gmpo_terms,
    compute_kl_cov_terms,
    compute_token_covariances,
    compute_vespo_terms,
    find_top_entropy_tokens,
)
from tunesmith.errors import ConfigError

LOGPROBS = [[-1.0, -3.0], [-2.0], [-4.0, 0.0]]
"""Mean -2."""
ADVANTAGES = [[2.0, 2.0], [0.0], [-2.0, -2.0]]
"""Mean 0."""
COVARIANCES = [2.0, -2.0, 0.0, 4.0, -4.0]


def test_covariances_are_centered_over_the_update():
    scores = build_scores(ADVANTAGES, logprobs=LOGPROBS)
    np.testing.assert_allclose(compute_token_covariances(scores), COVARIANCES)
    shifted = build_scores(
        [[a + 7 for a in row] for row in ADVANTAGES], logprobs=[[x - 5 for x in row] for row in LOGPROBS]
    )
    np.testing.assert_allclose(compute_token_covariances(shifted), COVARIANCES)
    population = np.cov([x for row in LOGPROBS for x in row], [2, 2, 0, -2, -2], ddof=0)[0, 1]
    metrics = compute_kl_cov_terms(scores).metrics
    assert metrics == {"train/token_covariance": pytest.approx(population)} and population == 0.0


def test_clip_cov_masks_tokens_within_the_bounds():
    """Of 5 tokens, 2 are within [2, 4]; a fraction of .4 masks both, of .2 one of them, of .19 none."""
    scores = build_scores(ADVANTAGES, logprobs=LOGPROBS)
    args = {"covariance_low": 2.0, "covariance_high": 4.0}
    terms = compute_clip_cov_terms(scores, fraction=0.4, **args)
    assert terms.correction_E.tolist() == [0, 1, 1, 0, 1]
    assert terms.metrics["train/clip_cov_frac"] == pytest.approx(0.4)
    assert compute_clip_cov_terms(scores, fraction=1.0, **args).correction_E.tolist() == [0, 1, 1, 0, 1]
    masked = {
        tuple(
            compute_clip_cov_terms(
                build_scores(ADVANTAGES, logprobs=LOGPROBS, step=step), fraction=0.2, **args
            ).correction_E
        )
        for step in range(20)
    }
    assert masked == {(0, 1, 1, 1, 1), (1, 1, 1, 0, 1)}
    assert compute_clip_cov_terms(scores, fraction=0.19, **args).correction_E.all()
    assert compute_clip_cov_terms(scores, fraction=1.0, covariance_low=4.1, covariance_high=9.0).correction_E.all()


def test_the_draw_of_clip_cov_is_a_function_of_seed_and_step():
    rng = np.random.default_rng(0)
    advantages, logprobs = rng.standard_normal((2, 1, 500)).tolist()

    def draw(step: int, seed: int) -> list[int]:
        scores = build_scores(advantages, logprobs=logprobs, step=step)
        terms = compute_clip_cov_terms(scores, fraction=0.1, covariance_low=0.1, covariance_high=2.0, seed=seed)
        return np.flatnonzero(terms.correction_E == 0).tolist()

    assert len(draw(3, 0)) == 50
    assert draw(3, 0) == draw(3, 0)
    assert draw(3, 0) != draw(4, 0) != draw(4, 1)


def test_one_more_candidate_of_clip_cov_changes_at_most_one_masked_token():
    """Rounding moves tokens across a bound; the draw among the others must not change with them."""
    rng = np.random.default_rng(0)
    advantages, logprobs = rng.standard_normal((2, 1, 500)).tolist()
    scores = build_scores(advantages, logprobs=logprobs)
    covariances = np.sort(compute_token_covariances(scores))
    low = float(covariances[np.searchsorted(covariances, 0.1)])

    def draw(bound: float) -> set[int]:
        terms = compute_clip_cov_terms(scores, fraction=0.1, covariance_low=bound, covariance_high=2.0)
        return set(np.flatnonzero(terms.correction_E == 0).tolist())

    fewer, most_changed = np.nextafter(low, 1.0), 0
    for bound in (low, fewer, *covariances[np.searchsorted(covariances, 0.1) :][:20]):
        changed = len(draw(low) - draw(float(bound)))
        most_changed = max(most_changed, changed)
        assert changed <= int(np.sum((covariances >= low) & (covariances < bound)))
    assert most_changed > 0


def test_clip_cov_refuses_bounds_in_the_wrong_order():
    with pytest.raises(ConfigError, match="covariance_low=3 in terms_args is above covariance_high=1"):
        compute_clip_cov_terms(build_scores([[1.0]], logprobs=[[-1.0]]), covariance_low=3.0, covariance_high=1.0)


@pytest.mark.parametrize(("fraction", "selected"), [(0.19, []), (0.2, [3]), (0.59, [0, 3]), (0.6, [0, 2, 3])])
def test_kl_cov_selects_the_highest_covariances(fraction, selected):
    terms = compute_kl_cov_terms(build_scores(ADVANTAGES, logprobs=LOGPROBS), fraction=fraction)
    assert np.flatnonzero(terms.is_selected_E).tolist() == selected
    assert terms.correction_E is None


def test_kl_cov_selects_the_earlier_of_equal_covariances():
    scores = build_scores([[1.0, 1.0, -1.0, -1.0]], logprobs=[[-1.0, -1.0, -3.0, -3.0]])
    assert compute_kl_cov_terms(scores, fraction=0.5).is_selected_E.tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("fraction", "num_kept"), [(0.2, 2), (0.21, 3), (0.3, 3), (0.1, 1), (0.01, 1), (1e-9, 1), (0.95, 10), (0.7, 7)]
)
def test_the_share_of_tokens_of_highest_entropy_is_kept(fraction, num_kept):
    entropies = [0.9, 0.1, 0.3, 0.8, 0.2, 1.0, 0.4, 0.6, 0.7, 0.5]
    scores = build_scores([[0.0] * 4, [0.0] * 6], entropies=[entropies[:4], entropies[4:]])
    kept, metrics = find_top_entropy_tokens(scores, fraction=fraction)
    threshold = sorted(entropies)[-num_kept]
    assert kept.tolist() == [float(entropy >= threshold) for entropy in entropies]
    assert metrics == pytest.approx(
        {"train/entropy_threshold": threshold, "train/entropy_masked_frac": 1 - num_kept / 10}
    )


def test_equal_entropies_are_kept_together():
    """Rounding of 1e-7, as between packings in float32, does not separate them."""
    scores = build_scores([[0.0] * 6], entropies=[[0.5, 0.5 - 1e-7, 0.5 + 1e-7, 0.5, 0.2, 0.1]])
    for fraction in (0.1, 0.3, 0.6):
        assert find_top_entropy_tokens(scores, fraction=fraction)[0].tolist() == [1, 1, 1, 1, 0, 0]
    deterministic = build_scores([[0.0] * 3], entropies=[[0.0, 0.0, 0.0]])
    assert find_top_entropy_tokens(deterministic, fraction=0.2)[0].all()


def test_expert_tokens_are_not_masked_by_entropy():
    scores = build_scores([[0.0] * 2, [0.0] * 2], entropies=[[9.0, 0.0], [1.0, 2.0]], experts=[True, False])
    kept, metrics = find_top_entropy_tokens(scores, fraction=0.5)
    assert kept.tolist() == [1, 1, 0, 1]
    assert metrics == {"train/entropy_threshold": 2.0, "train/entropy_masked_frac": 0.5}
    experts = build_scores([[0.0]], entropies=[[1.0]], experts=[True])
    assert find_top_entropy_tokens(experts, fraction=0.5) == (pytest.approx([1.0]), {})


def test_all_tokens_are_kept_without_a_fraction():
    kept, metrics = find_top_entropy_tokens(build_scores([[0.0, 0.0]]), fraction=1.0)
    assert kept.all() and metrics == {}


def test_selections_of_no_tokens_are_empty():
    empty = build_scores([], logprobs=[], entropies=[])
    for compute in (compute_clip_cov_terms, compute_vespo_terms):
        assert compute(empty).correction_E.size == 0
    for compute in (compute_kl_cov_terms, compute_gmpo_terms):
        assert compute(empty).is_selected_E.size == 0
    assert find_top_entropy_tokens(empty, fraction=0.2)[0].size == 0
