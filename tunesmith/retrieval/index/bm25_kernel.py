"""Adding up BM25 scores, compiled by numba.

Words are added from the largest possible score to the smallest, as in `bm25.add_up`, and their float32 sums in the same
order, so scores are the same too. Long lists of passages are left out where look-ups alone can complete the ranking
(MaxScore). The functions run without the GIL, so that threads search at the same time. Their machine code is kept
beside this file, or in the cache folder of the user. Without numba (`IS_COMPILED`) they would be slower than NumPy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

try:
    import numba
except ImportError:
    IS_COMPILED = False
else:
    IS_COMPILED = True

Function = TypeVar("Function", bound=Callable[..., Any])
LOOK_UP_COST = 64
"""Passages of a word that are added up in the time of one look-up."""
BLOCK = 64
"""Sums that are compared with a threshold at once."""


def compiled(function: Function) -> Function:
    """The function in machine code; without numba as it is."""
    if not IS_COMPILED:
        return function
    result: Function = numba.njit(cache=True, nogil=True)(function)
    return result


class Scratch(threading.local):
    """Sums of one thread over all passages, filled up to whole blocks; they are zero between searches."""

    def __init__(self, num_passages: int) -> None:
        self.totals = np.zeros(-(-num_passages // BLOCK) * BLOCK, dtype=np.float32)


@compiled
def count_larger(block: NDArray[np.float32], threshold: np.float32) -> int:
    """How many of a block of sums are larger; in this form it compiles to vector instructions."""
    count = np.int32(0)
    for place in range(BLOCK):
        count += np.int32(block[place] > threshold)
    return int(count)


@compiled
def find_nth_largest(totals: NDArray[np.float32], number: int) -> float:
    """The `number`-th largest sum; 0 if fewer are above 0."""
    heap = np.zeros(number, dtype=np.float32)  # the largest sums so far, the smallest of them first
    blocks = totals.reshape(-1, BLOCK)
    for block in range(len(blocks)):
        if count_larger(blocks[block], heap[0]) == 0:
            continue
        for total in blocks[block]:
            if total <= heap[0]:
                continue
            place, child = 0, 1
            while child < number:
                if child + 1 < number and heap[child + 1] < heap[child]:
                    child += 1
                if heap[child] >= total:
                    break
                heap[place] = heap[child]
                place, child = child, 2 * child + 1
            heap[place] = total
    return float(heap[0])


@compiled
def collect(totals: NDArray[np.float32], needed: float, limit: int) -> NDArray[np.int32]:
    """The passages with a sum above 0 that reaches `needed`; none if there are more than `limit`."""
    found = np.empty(16, dtype=np.int32)
    num_found = 0
    # the largest float32 below `needed`, and 0 at least
    below = np.float32(max(0.0, np.nextafter(np.float32(needed), np.float32(-1))))
    blocks = totals.reshape(-1, BLOCK)
    for block in range(len(blocks)):
        num_kept = count_larger(blocks[block], below)
        if num_kept == 0:
            continue
        if num_found + num_kept > limit:
            return found[:0]
        if num_found + num_kept > len(found):
            larger = np.empty(2 * (num_found + num_kept), dtype=np.int32)
            larger[:num_found] = found[:num_found]
            found = larger
        for position in range(block * BLOCK, (block + 1) * BLOCK):
            if totals[position] > below:
                found[num_found] = position
                num_found += 1
    return found[:num_found]


@compiled
def look_up(
    found: NDArray[np.int32],
    totals: NDArray[np.float32],
    positions: NDArray[np.int32],
    gains: NDArray[np.float32],
    count: float,
) -> None:
    """Add what one word gives to those of the passages that contain it."""
    for position in found:
        place = np.searchsorted(positions, position)
        if place < len(positions) and positions[place] == position:
            totals[position] += gains[place] * count


@compiled
def add_up_words(
    all_positions: NDArray[np.int32],
    all_gains: NDArray[np.float32],
    words: NDArray[np.int64],
    counts: NDArray[np.float32],
    bounds: NDArray[np.float64],
    top_n: int,
    totals: NDArray[np.float32],
    look_up_cost: int = LOOK_UP_COST,
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Passages, ascending, among them the `top_n` best and all that tie with the last of these, with their full scores.

    Args:
        all_positions, all_gains: The passages that contain a word and what it adds to the score of each, for all words.
        words: [N, 2] where those of each word of the query begin and end.
        counts: [N] how often the query has the word.
        bounds: [N] limits on what a word and those after it add.
        totals: A `Scratch`.
    """
    num_left = 0
    for start, end in words:
        num_left += end - start
    for number in range(len(words)):
        if 2 * num_left > len(totals):  # else adding up takes less time than finding out what can be left out
            needed = find_nth_largest(totals, top_n) - bounds[number]
            limit = num_left // (look_up_cost * (len(words) - number))
            found = collect(totals, needed, limit if needed > 0 else 0)
            if len(found) > 0:
                for later in range(number, len(words)):
                    start, end = words[later]
                    look_up(found, totals, all_positions[start:end], all_gains[start:end], counts[later])
                scores = totals[found]
                totals[:] = 0
                return found, scores
        start, end = words[number]
        for place in range(start, end):
            totals[all_positions[place]] += all_gains[place] * counts[number]
        num_left -= end - start
    found = collect(totals, find_nth_largest(totals, top_n), len(totals))
    scores = totals[found]
    totals[:] = 0
    return found, scores
