"""Durations of slow tools, for benchmarks of rollouts that wait for them."""

from __future__ import annotations

import math
import random
import statistics

DECK_SIZE = 1024


class Sleeps:
    """Log-normal durations in seconds, from shuffled decks of equally likely quantiles."""

    def __init__(self, *, median_s: float, p99_s: float, seed: int) -> None:
        sigma = math.log(p99_s / median_s) / statistics.NormalDist().inv_cdf(0.99) if median_s else 0.0
        quantiles = [statistics.NormalDist().inv_cdf((i + 0.5) / DECK_SIZE) for i in range(DECK_SIZE)]
        self._deck = [median_s * math.exp(sigma * z) for z in quantiles]
        self._rng = random.Random(seed)
        self._left: list[float] = []

    def draw(self) -> float:
        if not self._left:
            self._left = self._rng.sample(self._deck, DECK_SIZE)
        return self._left.pop()
