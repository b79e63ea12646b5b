"""A token trie over samples, as flat arrays: shared prefixes are stored once.

Nodes are in depth-first order, so a subtree is a range: node k is an ancestor of node q, or q itself, exactly when
k <= q < subtree_end[k], and a node's depth is its position in every sample that contains it. An event is a sampled
token of one sample, predicted by the node before it. Samples that sampled the same token in the same context share
nodes but have one event each, with its own advantage. A sample's last sampled token predicts nothing, so it and the
tokens after it have no node.

Axes: T nodes, E events.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tunesmith.types import Sample

EMPTY = np.zeros(0, dtype=np.int64)
STRUCT_CODES: dict[type, str] = {bool: "?", np.int64: "q", np.float64: "d"}
"""Numpy type -> format character of `struct`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trie:
    """A trie with one root, or several concatenated ones."""

    token_ids_T: np.ndarray
    depth_T: np.ndarray
    subtree_end_T: np.ndarray
    """One past the last node of each node's subtree."""
    parent_E: np.ndarray
    """The node that predicts the event's token."""
    target_E: np.ndarray
    """The token that was sampled."""
    sample_E: np.ndarray
    """Index of the event's sample in the batch."""
    time_E: np.ndarray
    """Position of the event's token in its sample."""
    num_flat_tokens: int
    """Number of nodes without prefix sharing."""

    def __post_init__(self) -> None:
        assert len(self.token_ids_T) == len(self.depth_T) == len(self.subtree_end_T)
        assert len(self.parent_E) == len(self.target_E) == len(self.sample_E) == len(self.time_E)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_T)


def build_trie(samples: Sequence[Sample], indices: Sequence[int]) -> Trie:
    """The trie over `samples[i]` for i in `indices`; samples without trained tokens have no node.

    Paths are inserted in lexicographic order of their token ids, so the longest shared prefix of each path is shared
    with the one inserted before it.
    """
    times = {index: np.flatnonzero(read_array(samples[index].is_sampled, bool)) for index in indices}
    paths = {index: _select_path(samples[index], times[index]) for index in indices}
    nodes_of_sample: dict[int, np.ndarray] = {}
    token_parts, depth_parts, closings = [], [], []
    num_nodes = 0
    tokens, nodes = EMPTY, EMPTY
    for index in sorted((index for index in indices if paths[index]), key=lambda index: paths[index]):
        previous, tokens = tokens, read_array(paths[index], np.int64)
        num_shared = count_shared(previous, tokens)
        num_new = len(tokens) - num_shared
        closings.append((nodes[num_shared:], num_nodes))
        nodes = np.concatenate([nodes[:num_shared], np.arange(num_nodes, num_nodes + num_new)])
        nodes_of_sample[index] = nodes
        token_parts.append(tokens[num_shared:])
        depth_parts.append(np.arange(num_shared, len(tokens)))
        num_nodes += num_new
    closings.append((nodes, num_nodes))
    subtree_end_T = np.zeros(num_nodes, dtype=np.int64)
    for closed, end in closings:
        subtree_end_T[closed] = end
    return Trie(
        token_ids_T=_concatenate(token_parts),
        depth_T=_concatenate(depth_parts),
        subtree_end_T=subtree_end_T,
        num_flat_tokens=sum(len(path) for path in paths.values()),
        **_build_events(samples, nodes_of_sample, times),
    )


def concatenate_tries(tries: Sequence[Trie]) -> Trie:
    """Tries laid end to end as one."""
    starts = np.cumsum([0, *(trie.num_tokens for trie in tries)])[:-1].tolist()
    return Trie(
        token_ids_T=_concatenate([trie.token_ids_T for trie in tries]),
        depth_T=_concatenate([trie.depth_T for trie in tries]),
        subtree_end_T=_concatenate([trie.subtree_end_T + start for trie, start in zip(tries, starts, strict=True)]),
        parent_E=_concatenate([trie.parent_E + start for trie, start in zip(tries, starts, strict=True)]),
        target_E=_concatenate([trie.target_E for trie in tries]),
        sample_E=_concatenate([trie.sample_E for trie in tries]),
        time_E=_concatenate([trie.time_E for trie in tries]),
        num_flat_tokens=sum(trie.num_flat_tokens for trie in tries),
    )


def read_array(values: Sequence[float | None] | np.ndarray, dtype: type) -> np.ndarray:
    """The values as a read-only array; None is NaN.

    `struct.pack` converts a sequence of Python numbers three times as fast as numpy.
    """
    if isinstance(values, np.ndarray):
        return np.asarray(values, dtype=dtype)
    if len(values) == 0:
        return np.empty(0, dtype=dtype)
    try:
        return np.frombuffer(struct.pack(f"{len(values)}{STRUCT_CODES[dtype]}", *values), dtype=dtype)
    except struct.error:  # a None
        return np.fromiter(values, dtype=dtype, count=len(values))


def _select_path(sample: Sample, time_N: np.ndarray) -> tuple[int, ...]:
    """The tokens needed to predict the sample's events: all before its last sampled token."""
    return sample.token_ids[: time_N[-1]] if len(time_N) else ()


def count_shared(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def _build_events(
    samples: Sequence[Sample], nodes_of_sample: dict[int, np.ndarray], times_of_sample: dict[int, np.ndarray]
) -> dict[str, np.ndarray]:
    """Events ordered by sample, then time."""
    parents, targets, sample_indices, times = [], [], [], []
    for index in sorted(nodes_of_sample):
        time_N, token_ids = times_of_sample[index], samples[index].token_ids
        parents.append(nodes_of_sample[index][time_N - 1])
        first = int(time_N[0])
        targets.append(read_array(token_ids[first:], np.int64)[time_N - first])
        sample_indices.append(np.full(len(time_N), index, dtype=np.int64))
        times.append(time_N)
    return {
        "parent_E": _concatenate(parents),
        "target_E": _concatenate(targets),
        "sample_E": _concatenate(sample_indices),
        "time_E": _concatenate(times),
    }


def _concatenate(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else EMPTY
