"""Tree attention with the sampler's order of additions (`model.numerics=exact`), without gradients.

Each chain of the trie is a span whose row of the block table lists the places of its path, so a block holds one token.

Axes: T tokens of the row, S spans, P tokens of the longest path, I tiles, H query heads, K key-value heads, D head
size.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tunesmith.experience.samples import Trie
from tunesmith.model.arrays import concatenate_ranges, copy_to_device
from tunesmith.model.kernels.paged_prefill import run_paged_prefill
from tunesmith.model.kernels.prologue import Prologue
from tunesmith.model.kernels.span_attention import EXACT_ROWS, get_tile_tokens
from tunesmith.trainer.tree_attention.cpu import split_segments


def build_spans(trie: Trie, num_groups: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The chains of a trie as `run_paged_prefill` takes them: block table [S, P], spans [3, S], tiles [2, I].

    `num_groups` are the query heads of a key-value head. Sizes are powers of two, so that rows share CUDA graphs; a
    span of padding has no tokens, and tiles of padding belong to the last span, which is one.
    """
    chains = split_segments(trie, max_child_tokens=max(trie.num_tokens, 1))
    lengths = np.array([chain.end - chain.start for chain in chains], np.int64)
    depths = trie.depth_T[[chain.start for chain in chains]]
    table_SP = np.zeros((_round_up(len(chains) + 1), _round_up(int((depths + lengths).max()))), np.int32)
    spans_3S = np.zeros((3, len(table_SP)), np.int32)
    for index, (chain, depth, length) in enumerate(zip(chains, depths.tolist(), lengths.tolist(), strict=True)):
        if chain.parent is not None:
            table_SP[index, :depth] = table_SP[chain.parent, :depth]
        table_SP[index, depth : depth + length] = np.arange(chain.start, chain.end)
        spans_3S[:, index] = chain.start, depth, depth + length
    tile_tokens = get_tile_tokens(num_groups, EXACT_ROWS)
    num_tiles = -(-lengths // tile_tokens)
    tiles_2I = np.full((2, _round_up(int(num_tiles.sum()))), len(table_SP) - 1, np.int32)
    tiles_2I[0, : num_tiles.sum()] = np.repeat(np.arange(len(chains)), num_tiles)
    tiles_2I[1, : num_tiles.sum()] = concatenate_ranges(np.zeros_like(lengths), num_tiles) * tile_tokens
    table, spans, tiles = (copy_to_device(each, device) for each in (table_SP, spans_3S, tiles_2I))
    return table, spans, tiles


def _round_up(size: int) -> int:
    return 1 << (size - 1).bit_length()


def attend_exactly(
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    paths_SP: Tensor,
    spans_3S: Tensor,
    tiles_2I: Tensor,
    window: int,
    scaling: float,
    softcap: float,
    prologue: Prologue | None = None,
) -> Tensor:
    """Attention [1, T, H, D]; paths, spans and tiles are those of `build_spans`, `window` and `softcap` 0 mean none."""
    query, key, value = (
        each if each.stride(-1) == 1 else each.contiguous() for each in (query_1HTD, key_1KTD, value_1KTD)
    )
    num_tokens = query.shape[2]
    keys, values = (each.new_empty((num_tokens, each.shape[1], 1, each.shape[3])) for each in (key, value))
    slots_T = torch.arange(num_tokens, device=query.device)
    return run_paged_prefill(
        query, key, value, keys, values, slots_T, paths_SP, spans_3S, tiles_2I, scaling, window, softcap,
        prologue=prologue,
    )  # fmt: skip
