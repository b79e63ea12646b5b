"""Statistics compared with numbers worked out by hand, closed formulas, and scipy if it is installed."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.commands.eval import sample_scores as significance
from tunesmith.commands.eval.sample_scores import (
    choose_pass_at_k,
    compare_paired,
    compute_bootstrap_interval,
    compute_pass_at_k,
    compute_sign_test,
)


def test_bootstrap_interval_is_close_to_the_normal_approximation():
    low, high = compute_bootstrap_interval([1.0] * 60 + [0.0] * 40, seed=0)
    assert low == pytest.approx(0.6 - 1.96 * 0.049, abs=0.011)
    assert high == pytest.approx(0.6 + 1.96 * 0.049, abs=0.011)


def test_bootstrap_of_three_scores_matches_the_exact_distribution():
    """All 27 equally likely resamples of (0, 0, 1) give means 0 (8/27), 1/3 (12/27), 2/3 (6/27) and 1 (1/27)."""
    assert compute_bootstrap_interval([0.0, 0.0, 1.0], seed=3) == (0.0, pytest.approx(1.0))
    assert compute_bootstrap_interval([0.5] * 3, seed=3) == (0.5, 0.5)


def test_bootstrap_does_not_depend_on_the_chunk_size_of_its_draws(monkeypatch):
    scores = [random.Random(1).random() for _ in range(7)]
    expected = compute_bootstrap_interval(scores, seed=5)
    monkeypatch.setattr(significance, "MAX_DRAWS_AT_ONCE", 7 * 1000)
    assert compute_bootstrap_interval(scores, seed=5) == expected


def test_bootstrap_agrees_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    scores = np.random.default_rng(2).beta(2, 5, size=200)
    theirs = stats.bootstrap(
        (scores,), np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(4)
    ).confidence_interval
    assert compute_bootstrap_interval(list(scores), seed=0) == pytest.approx((theirs.low, theirs.high), abs=2e-3)


@pytest.mark.parametrize(
    ("num_better", "num_worse", "p_value"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (5, 0, 2 / 32),
        (0, 5, 2 / 32),
        (6, 2, 2 * (1 + 8 + 28) / 256),
        (10, 10, 1.0),
        (9, 1, 2 * (1 + 10) / 1024),
    ],
)
def test_sign_test_on_splits_worked_out_by_hand(num_better, num_worse, p_value):
    assert compute_sign_test(num_better, num_worse) == pytest.approx(p_value, rel=1e-15)


def test_sign_test_is_exact_for_many_pairs_and_close_to_the_normal_approximation():
    z = (700 - 600 - 1) / math.sqrt(1300)
    assert compute_sign_test(700, 600) == pytest.approx(math.erfc(z / math.sqrt(2)), rel=0.01)
    assert 0 < compute_sign_test(1000, 0) == 2.0**-999


def test_sign_test_is_the_exact_fraction_rounded_once():
    for num_better, num_worse in itertools.product(range(25), repeat=2):
        num_pairs = num_better + num_worse
        tail = sum(math.comb(num_pairs, count) for count in range(min(num_better, num_worse) + 1))
        expected = float(min(Fraction(1), Fraction(2 * tail, 2**num_pairs)))
        assert compute_sign_test(num_better, num_worse) == expected


def test_sign_test_of_tens_of_thousands_of_pairs():
    """With a coefficient computed anew for each count, this would take minutes."""
    z = (20_200 - 19_800 - 1) / math.sqrt(40_000)
    assert compute_sign_test(20_200, 19_800) == pytest.approx(math.erfc(z / math.sqrt(2)), rel=1e-3)


@given(st.integers(0, 60), st.integers(0, 60))
def test_sign_test_agrees_with_scipy(num_better, num_worse):
    stats = pytest.importorskip("scipy.stats")
    if num_better + num_worse:
        theirs = stats.binomtest(num_better, num_better + num_worse).pvalue
        assert compute_sign_test(num_better, num_worse) == pytest.approx(theirs, rel=1e-9)


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_fraction_of_subsets_with_a_pass(num_samples, data):
    num_passed = data.draw(st.integers(0, num_samples))
    k = data.draw(st.integers(1, num_samples))
    outcomes = [1] * num_passed + [0] * (num_samples - num_passed)
    subsets = list(itertools.combinations(outcomes, k))
    expected = sum(any(each) for each in subsets) / len(subsets)
    found = compute_pass_at_k(num_samples=num_samples, num_passed=num_passed, k=k)
    assert found == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_equals_the_published_product_form():
    """Chen et al. (2021) compute 1 - prod(1 - k / i for i in n-c+1 .. n)."""
    expected = 1.0 - math.prod(1.0 - 10 / i for i in range(200 - 7 + 1, 200 + 1))
    assert compute_pass_at_k(num_samples=200, num_passed=7, k=10) == pytest.approx(expected, rel=1e-12)


def test_pass_at_k_needs_k_samples():
    with pytest.raises(ValueError, match="pass@5 needs k from 1 to the number of samples, 4"):
        compute_pass_at_k(num_samples=4, num_passed=1, k=5)


def test_pass_at_k_is_reported_for_powers_of_two_and_the_number_of_samples():
    assert [choose_pass_at_k(n) for n in (1, 2, 5, 8)] == [(1,), (1, 2), (1, 2, 4, 5), (1, 2, 4, 8)]


def test_paired_binary_scores_use_mcnemars_test():
    before = [0.0] * 8 + [1.0] * 12
    after = [1.0] * 6 + [0.0] * 2 + [1.0] * 10 + [0.0] * 2
    found = compare_paired(before, after, seed=0)
    assert (found.num_better, found.num_worse, found.num_tasks, found.test) == (6, 2, 20, "McNemar")
    assert found.mean == pytest.approx(4 / 20)
    assert found.p_value == pytest.approx(74 / 256)
    spread = math.sqrt((8 - 16 / 20) / 20 / 20)
    assert found.interval == pytest.approx((0.2 - 1.96 * spread, 0.2 + 1.96 * spread), abs=0.03)


def test_paired_mean_scores_use_the_sign_test():
    found = compare_paired([0.25, 0.5, 1.0, 0.0], [0.5, 0.75, 1.0, 0.25], seed=0)
    assert (found.num_better, found.num_worse, found.test) == (3, 0, "sign")
    assert found.p_value == 0.25
    assert found.mean == pytest.approx(0.1875)


def test_the_paired_interval_resolves_differences_that_single_intervals_do_not():
    """Tasks differ far more than models: the single intervals overlap, the paired interval excludes zero."""
    before = [random.Random(i).random() for i in range(50)]
    after = [score + 0.05 for score in before]
    assert compute_bootstrap_interval(before, seed=0)[1] > compute_bootstrap_interval(after, seed=0)[0]
    assert compare_paired(before, after, seed=0).interval == pytest.approx((0.05, 0.05))
