"""What a number of scores allows to be said: intervals, paired differences, exact tests, pass@k.

All draws of a bootstrap are over tasks, which are independent; the runs of one task are not.
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
"""Bounds the memory of a bootstrap to some tens of megabytes."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How much higher one model's scores are than another's, on the same tasks."""

    mean: float
    interval: Interval
    """95 % bootstrap interval of the mean difference over tasks."""
    num_better: int
    """Tasks with a higher score."""
    num_worse: int
    num_tasks: int
    """Tasks that both have a score of."""
    p_value: float
    """Two-sided, exact: how likely so uneven a split of better and worse tasks is if either were as likely."""
    test: Literal["McNemar", "sign"]
    """McNemar's test where every score is 0 or 1, the sign test otherwise."""


def compute_bootstrap_interval(scores: Sequence[float], *, seed: int) -> Interval:
    """95 % percentile bootstrap of the mean (Efron, 1979), over `scores` as independent draws."""
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
    """Compare two models' scores of the same tasks, in the same order; at least one task is needed."""
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
    """Two-sided p-value of a split under a fair coin, exactly; ties are left out.

    On scores of 0 and 1 the split is that of the discordant pairs, and this is McNemar's exact test.
    """
    num_pairs, num_rarer = num_better + num_worse, min(num_better, num_worse)
    tail = sum(math.comb(num_pairs, count) for count in range(num_rarer + 1))
    return float(min(Fraction(1), Fraction(2 * tail, 2**num_pairs)))


def compute_pass_at_k(*, num_samples: int, num_passed: int, k: int) -> float:
    """Chance that one of k runs passes, without bias, from n of which c did: 1 - C(n-c, k) / C(n, k) (Chen et al.,
    2021, eq. 1)."""
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs k from 1 to the number of samples, {num_samples}")
    return 1.0 - float(Fraction(math.comb(num_samples - num_passed, k), math.comb(num_samples, k)))


def list_powers(num_samples: int) -> tuple[int, ...]:
    """The k that pass@k is told for: 1, 2, 4, ... and the number of samples itself."""
    powers = {2**exponent for exponent in range(num_samples.bit_length()) if 2**exponent <= num_samples}
    return tuple(sorted(powers | {num_samples}))
