"""Rankings: the best positions of an array of scores in a fixed order, and fusion of two rankings.

Positions are row numbers of the corpus. Equal scores are ordered by the ids of their passages, so that a ranking is a
function of the corpus and the query, whatever else is searched at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RRF_K = 60
"""Constant of reciprocal rank fusion (Cormack, Clarke and Buettcher, SIGIR 2009, section 2)."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Positions [N] of passages, best first, and their scores [N]."""

    positions: NDArray[np.int64]
    scores: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.positions)


def rank(
    positions: NDArray[np.integer], scores: NDArray[np.float32], top_n: int, id_ranks: NDArray[np.int32]
) -> Ranking:
    """The `top_n` best of the given positions [N] by score [N], ties by id."""
    if len(scores) > top_n:
        # all positions that tie with the last one that fits take part in the sort
        threshold = np.partition(scores, len(scores) - top_n)[len(scores) - top_n]
        kept = scores >= threshold
        positions, scores = positions[kept], scores[kept]
    order = np.lexsort((id_ranks[positions], -scores))[:top_n]
    return Ranking(positions[order].astype(np.int64), scores[order])


def fuse(rankings: list[Ranking], top_n: int, id_ranks: NDArray[np.int32]) -> Ranking:
    """Reciprocal rank fusion: a passage scores the sum of 1 / (60 + its rank) over the rankings that have it."""
    positions, inverse = np.unique(np.concatenate([each.positions for each in rankings]), return_inverse=True)
    gains = np.concatenate([1.0 / (RRF_K + 1 + np.arange(len(each))) for each in rankings])
    scores = np.zeros(len(positions))
    np.add.at(scores, inverse, gains)
    return rank(positions, scores.astype(np.float32), top_n, id_ranks)
