"""Packing of samples into rows; one forward and backward computes one row.

With prefix sharing the samples of a group form one trie; without, each sample is a separate path. A trie longer than
a row is split into tries of fewer samples; a single path longer than a row is a separate row. Rows are balanced by
cost. Nothing is padded or truncated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tunesmith.experience.samples import Trie, build_trie, concatenate_tries
from tunesmith.types import Sample


def pack_samples(
    samples: Sequence[Sample], *, max_tokens_per_row: int, has_prefix_sharing: bool, hidden_size: int
) -> list[Trie]:
    """Rows of at most `max_tokens_per_row` tokens that contain every trained event of the samples exactly once."""
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group_index if has_prefix_sharing else index, []).append(index)
    tries = [trie for indices in groups.values() for trie in _build_tries(samples, indices, max_tokens_per_row)]
    costs = [compute_cost(trie, hidden_size=hidden_size) for trie in tries]
    rows = _fill_rows([trie.num_tokens for trie in tries], costs, max_tokens_per_row)
    return [concatenate_tries([tries[index] for index in row]) for row in rows]


def compute_cost(trie: Trie, *, hidden_size: int) -> float:
    """Cost of forward and backward, in units of the matrix products of one token.

    A layer needs about 12 C^2 multiplications for a token and 2 C for each pair of tokens that attend.
    """
    return combine_cost(trie.num_tokens, float((trie.depth_T + 1).sum()), hidden_size=hidden_size)


def combine_cost(num_tokens: int, num_pairs: float, *, hidden_size: int) -> float:
    """`compute_cost` of a trie with these numbers of tokens, and of pairs of tokens that attend."""
    return num_tokens + num_pairs / (6 * hidden_size)


def _build_tries(samples: Sequence[Sample], indices: Sequence[int], max_tokens: int) -> list[Trie]:
    trie = build_trie(samples, indices)
    if trie.num_tokens == 0:
        return []
    if trie.num_tokens <= max_tokens or len(indices) == 1:
        return [trie]
    ordered = sorted(indices, key=lambda index: samples[index].token_ids)
    middle = len(ordered) // 2
    return [part for half in (ordered[:middle], ordered[middle:]) for part in _build_tries(samples, half, max_tokens)]


def _fill_rows(lengths: Sequence[int], costs: Sequence[float], max_tokens: int) -> list[list[int]]:
    """Greedy bin packing by decreasing cost: each trie goes to the cheapest row with room, or to a new row."""
    num_rows = math.ceil(sum(lengths) / max_tokens)
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    row_lengths, row_costs = [0] * num_rows, [0.0] * num_rows
    for index in sorted(range(len(lengths)), key=lambda index: -costs[index]):
        fitting = [row for row in range(len(rows)) if row_lengths[row] + lengths[index] <= max_tokens]
        if not fitting:
            rows.append([])
            row_lengths.append(0)
            row_costs.append(0.0)
            fitting = [len(rows) - 1]
        row = min(fitting, key=lambda row: row_costs[row])
        rows[row].append(index)
        row_lengths[row] += lengths[index]
        row_costs[row] += costs[index]
    return [sorted(row) for row in rows if row]


def split_minibatches(
    samples: Sequence[Sample], num_minibatches: int, *, groups: Sequence[int] | None = None
) -> list[list[int]]:
    """Assign groups to minibatches round-robin, as sample indices; empty minibatches are left out.

    `groups` are the groups of the step in their order, of which some may be trained elsewhere: a minibatch of only
    such groups is an empty list.
    """
    ordered = dict.fromkeys(sample.group_index for sample in samples) if groups is None else groups
    minibatch_of_group = {group: index % num_minibatches for index, group in enumerate(ordered)}
    minibatches: list[list[int]] = [[] for _ in range(min(num_minibatches, len(minibatch_of_group)))]
    for index, sample in enumerate(samples):
        minibatches[minibatch_of_group[sample.group_index]].append(index)
    return minibatches
