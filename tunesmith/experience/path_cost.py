"""Work of training a group, without building its samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tunesmith.experience.samples import chain_turns
from tunesmith.experience.trie import count_shared, read_array
from tunesmith.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class PathCost:
    """Size of the trie of a group's samples."""

    num_tokens: int
    """Nodes: shared prefixes are counted once."""
    num_pairs: int
    """Pairs of a node and an ancestor, or itself."""


def measure_group(group: Group) -> PathCost:
    """Size of the trie over all trajectories of a group."""
    lasts = [chain[-1] for run in group.trajectories for chain in chain_turns(run.turns)]
    num_tokens, num_pairs = 0, 0
    previous = np.zeros(0, dtype=np.int64)
    for path in sorted((turn.prompt_ids + turn.sampled_ids)[:-1] for turn in lasts):
        tokens = read_array(path, np.int64)
        num_shared = count_shared(previous, tokens)
        num_tokens += len(tokens) - num_shared
        num_pairs += len(tokens) * (len(tokens) + 1) // 2 - num_shared * (num_shared + 1) // 2
        previous = tokens
    return PathCost(num_tokens=num_tokens, num_pairs=num_pairs)
