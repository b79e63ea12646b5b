"""Pareto fronts of questions by the spreads of their rollouts (ET-Agent, arXiv:2601.06860, section 3.3).

Each question has K rollouts. Its two objectives, both maximized, are the population standard deviation of their
correctness and of their numbers of tool calls. Within a front, questions are ordered by their crowding distance.

Results depend on the multiset of each question's rollouts, on the order of the questions and on the seed alone. Fronts
of two objectives are found in O(n log n). Axes: N questions, P distinct points, K rollouts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.errors import DataError

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
CORRECT_AT = 0.75
"""Correctness from which a rollout counts as right: 1 of 0 and 1, or a token F1 of 0.75 as in ET-Agent."""


def compute_spreads(values: Sequence[Sequence[float]]) -> Floats:
    """Population standard deviation of each question's values, independent of their order; NaN without values."""
    spreads_N = np.full(len(values), np.nan)
    lengths_N = np.fromiter((len(each) for each in values), dtype=np.int64, count=len(values))
    for length in np.unique(lengths_N[lengths_N > 0]).tolist():
        chosen = np.flatnonzero(lengths_N == length)
        rows = values if len(chosen) == len(values) else [values[index] for index in chosen.tolist()]
        values_NK = np.sort(np.asarray(rows, dtype=np.float64), axis=1)
        is_constant_N = values_NK[:, 0] == values_NK[:, -1]
        spreads_N[chosen] = np.where(is_constant_N, 0.0, values_NK.std(axis=1))
    return spreads_N


def find_mixed(correctness: Sequence[Sequence[float]], *, correct_at: float = CORRECT_AT) -> NDArray[np.bool_]:
    """Whether a question has a right and a wrong rollout: correctness of at least `correct_at`, and below it."""
    lowest_N = np.fromiter((min(each, default=np.nan) for each in correctness), np.float64, len(correctness))
    highest_N = np.fromiter((max(each, default=np.nan) for each in correctness), np.float64, len(correctness))
    return np.asarray((lowest_N < correct_at) & (highest_N >= correct_at))


def find_fronts(points_N2: Floats) -> Indices:
    """The number of the non-dominated front of each point, from 0; both objectives are maximized.

    A point dominates another if it is at least as large in both objectives and larger in one, so equal points share a
    front. Points are visited in descending order; a point belongs to the first front whose largest second objective is
    below its own. O(n log n).
    """
    if np.isnan(points_N2).any():
        raise ValueError("an objective is not a number; remove questions without rollouts first")
    order_N = np.lexsort((-points_N2[:, 1], -points_N2[:, 0]))
    sorted_N2 = points_N2[order_N]
    is_new_N = np.ones(len(points_N2), dtype=bool)
    is_new_N[1:] = (sorted_N2[1:] != sorted_N2[:-1]).any(axis=1)
    fronts_P: list[int] = []
    lowest: list[float] = []  # per front, minus the largest second objective so far; ascending
    for negated in (-sorted_N2[is_new_N, 1]).tolist():
        front = bisect_right(lowest, negated)
        if front == len(lowest):
            lowest.append(negated)
        else:
            lowest[front] = negated
        fronts_P.append(front)
    ranks_N = np.empty(len(points_N2), dtype=np.int64)
    ranks_N[order_N] = np.asarray(fronts_P, dtype=np.int64)[np.cumsum(is_new_N) - 1]
    return ranks_N


def compute_crowding(points_N2: Floats, ranks_N: Indices, *, ties_N: Indices) -> Floats:
    """Crowding distance of each point in its front (NSGA-II; Deb et al., 2002), larger where neighbors are farther.

    The distances are those of the distinct points of a front: per objective, the gap between the two neighbors over the
    range of the front. The two ends of a front have infinite distance. A front of one distinct point has no range, and
    distance 0. Of equal points the one with the smallest of `ties_N` has the distance, the others have a neighbor in
    the same place and distance 0.
    """
    distances_N = np.zeros(len(points_N2))
    if not len(points_N2):
        return distances_N
    order_N = np.lexsort((ties_N, points_N2[:, 0], ranks_N))  # in a front the second objective falls as the first rises
    ranks, points = ranks_N[order_N], points_N2[order_N]
    is_new_N = np.ones(len(order_N), dtype=bool)
    is_new_N[1:] = (ranks[1:] != ranks[:-1]) | (points[1:] != points[:-1]).any(axis=1)
    first_P = order_N[is_new_N]
    ranks_P, points_P2 = ranks_N[first_P], points_N2[first_P]
    start_P = np.searchsorted(ranks_P, ranks_P, side="left")
    end_P = np.searchsorted(ranks_P, ranks_P, side="right") - 1
    position_P = np.arange(len(first_P))
    is_alone_P = start_P == end_P
    is_end_P = (position_P == start_P) | (position_P == end_P)
    before_P, after_P = np.maximum(position_P - 1, start_P), np.minimum(position_P + 1, end_P)
    range_P2 = np.abs(points_P2[end_P] - points_P2[start_P])
    gap_P2 = np.abs(points_P2[after_P] - points_P2[before_P])
    inner_P = (gap_P2 / np.where(is_alone_P[:, None], 1.0, range_P2)).sum(axis=1)
    distances_N[first_P] = np.where(is_alone_P, 0.0, np.where(is_end_P, np.inf, inner_P))
    return distances_N


def sort_by_front(points_N2: Floats, *, rng: np.random.Generator) -> tuple[Indices, Indices, Floats]:
    """The points by front, then by descending crowding distance, then at random; with their fronts and distances."""
    ranks_N, ties_N = find_fronts(points_N2), rng.permutation(len(points_N2))
    distances_N = compute_crowding(points_N2, ranks_N, ties_N=ties_N)
    order_N = np.lexsort((ties_N, -distances_N, ranks_N))
    return order_N, ranks_N[order_N], distances_N[order_N]


def read_rollouts(row: Mapping[str, Any], *, key: str, where: str) -> list[float]:
    """The numbers of a question's rollouts in field `key`; DataError if it is missing or holds anything else."""
    values = row.get(key)
    if values is None:
        raise DataError(
            f"{where} has no {key!r}, one number for each rollout; its fields are {', '.join(map(str, row))}"
        )
    is_numeric = isinstance(values, list | tuple) and all(
        isinstance(value, int | float) and np.isfinite(value) for value in values
    )
    if not is_numeric:
        raise DataError(f"{where}: {key} must be a list of finite numbers, one for each rollout, got {values!r:.80}")
    return [float(value) for value in values]
