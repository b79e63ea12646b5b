"""Statistics of evaluation scores: bootstrap intervals, paired differences, exact tests, pass@k.

Bootstrap resamples are drawn over tasks, which are independent, never over the rollouts of a task, which are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

NUM_RESAMPLES = 10_000
MAX_DRAWS_AT_ONCE = 2_000_000
"""Limits the memory of a bootstrap to tens of megabytes."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Paired difference of two models' scores on the same tasks, later minus earlier model."""

    mean: float
    interval: Interval
    """95 % bootstrap interval of the mean difference over tasks."""
    num_better: int
    """Tasks on which the later model scores higher."""
    num_worse: int
    num_tasks: int
    """Tasks on which both models have a score."""
    p_value: float
    """Two-sided and exact: probability of a split of better and worse tasks at least this uneven if both are equally
    likely."""
    test: Literal["McNemar", "sign"]
    """McNemar's test if every score is 0 or 1, the sign test otherwise."""


def compute_bootstrap_interval(scores: Sequence[float], *, seed: int) -> Interval:
    """95 % percentile bootstrap interval of the mean of independent `scores` (Efron, 1979)."""
    values = np.asarray(scores, dtype=np.float64)
    rng = np.random.default_rng(seed)
    num_rows = max(1, MAX_DRAWS_AT_ONCE // len(values))
    means = np.concatenate(
        [
            values[rng.integers(len(values), size=(min(num_rows, NUM_RESAMPLES - start), len(values)))].mean(axis=1)
            for start in range(0, NUM_RESAMPLES, num_rows)
        ]
    )
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def compare_paired(before: Sequence[float], after: Sequence[float], *, seed: int) -> Difference:
    """Compare two models' scores on the same tasks, given in the same order; needs at least one task."""
    differences = [new - old for old, new in zip(before, after, strict=True)]
    num_better, num_worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return Difference(
        mean=math.fsum(differences) / len(differences),
        interval=compute_bootstrap_interval(differences, seed=seed),
        num_better=num_better,
        num_worse=num_worse,
        num_tasks=len(differences),
        p_value=compute_sign_test(num_better, num_worse),
        test="McNemar" if all(score in (0.0, 1.0) for score in (*before, *after)) else "sign",
    )


def compute_sign_test(num_better: int, num_worse: int) -> float:
    """Exact two-sided sign test of better against worse tasks, without ties.

    With scores of 0 and 1 the two counts are the discordant pairs, and this is McNemar's exact test.
    """
    num_pairs, num_rarer = num_better + num_worse, min(num_better, num_worse)
    tail = sum(math.comb(num_pairs, count) for count in range(num_rarer + 1))
    return float(min(Fraction(1), Fraction(2 * tail, 2**num_pairs)))


def compute_pass_at_k(*, num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased estimate of pass@k from n samples of which c passed: 1 - C(n-c, k) / C(n, k) (Chen et al., 2021,
    eq. 1)."""
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs k from 1 to the number of samples, {num_samples}")
    return 1.0 - float(Fraction(math.comb(num_samples - num_passed, k), math.comb(num_samples, k)))


def choose_pass_at_k(num_samples: int) -> tuple[int, ...]:
    """The k for which pass@k is reported: 1, 2, 4, ... and the number of samples itself."""
    powers = {2**exponent for exponent in range(num_samples.bit_length()) if 2**exponent <= num_samples}
    return tuple(sorted(powers | {num_samples}))
