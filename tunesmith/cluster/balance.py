"""Balance work over ranks with few moves."""

from __future__ import annotations

from collections.abc import Sequence

TOLERANCE = 0.02
"""Excess of the busiest rank over the mean, as a share of the mean, that is not worth moving a group."""


def balance_work(costs: Sequence[float], owners: Sequence[int], num_ranks: int) -> list[int]:
    """The rank of each item: its owner, unless moving it makes the busiest rank less busy.

    While the busiest rank exceeds the mean by `TOLERANCE`, one of its items moves to the least busy rank: the one that
    brings the two closest to each other. The result is a function of the arguments.
    """
    ranks = list(owners)
    loads = [0.0] * num_ranks
    for cost, rank in zip(costs, ranks, strict=True):
        loads[rank] += cost
    mean = sum(loads) / num_ranks
    for _ in range(len(costs)):
        busiest = max(range(num_ranks), key=lambda rank: (loads[rank], -rank))
        idlest = min(range(num_ranks), key=lambda rank: (loads[rank], rank))
        gap = loads[busiest] - loads[idlest]
        movable = [item for item, rank in enumerate(ranks) if rank == busiest and 0 < costs[item] < gap]
        if not movable or loads[busiest] <= mean * (1 + TOLERANCE):
            break
        item = min(movable, key=lambda item: (abs(costs[item] - gap / 2), item))
        ranks[item] = idlest
        loads[busiest] -= costs[item]
        loads[idlest] += costs[item]
    return ranks
