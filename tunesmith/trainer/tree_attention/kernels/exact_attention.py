"""Tree attention with the sampler's order of additions (`model.numerics=exact`); the tree kernels compute gradients.

Each chain of the trie is a span whose row of the block table lists the places of its path, so a block holds one token.

Axes: T tokens of the row, S spans, P tokens of the longest path, I tiles, H query heads, K key-value heads, D head
size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tunesmith.experience.samples import Trie
from tunesmith.model.arrays import copy_to_device, list_tiles, pad_tiles
from tunesmith.model.forward.recurrence import Segment
from tunesmith.model.kernels.layer_gradients import backward_norm_and_rotate, norm_and_rotate
from tunesmith.model.kernels.paged_prefill import run_paged_prefill
from tunesmith.model.kernels.prologue import Prologue
from tunesmith.model.kernels.span_attention import count_tile_rows, get_tile_tokens
from tunesmith.trainer.tree_attention.cpu import split_segments
from tunesmith.trainer.tree_attention.kernels.tree_attention import tree_attention_backward


def build_spans(trie: Trie, heads: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The chains of a trie as `run_paged_prefill` takes them: block table [S, P], spans [3, S], tiles [2, I].

    `heads`: the query heads of a key-value head, and their size. Tensors have powers of two as sizes, so that rows can
    share CUDA graphs; a span of padding has no tokens, and tiles of padding belong to the last span, which is one.
    """
    first = trie.num_tokens - count_padding(trie)
    chains = [each for each in split_segments(trie, max_child_tokens=max(trie.num_tokens, 1)) if each.start < first]
    if first < trie.num_tokens:  # one chain: each has a row of the block table
        chains.append(Segment(start=first, end=trie.num_tokens, parent=None))
    lengths = np.array([chain.end - chain.start for chain in chains], np.int64)
    depths = trie.depth_T[[chain.start for chain in chains]]
    table_SP = np.zeros((_round_up(len(chains) + 1), _round_up(int((depths + lengths).max()))), np.int32)
    spans_3S = np.zeros((3, len(table_SP)), np.int32)
    for index, (chain, depth, length) in enumerate(zip(chains, depths.tolist(), lengths.tolist(), strict=True)):
        if chain.parent is not None:
            table_SP[index, :depth] = table_SP[chain.parent, :depth]
        table_SP[index, depth : depth + length] = np.arange(chain.start, chain.end)
        spans_3S[:, index] = chain.start, depth, depth + length
    tile_tokens = get_tile_tokens(heads[0], count_tile_rows(heads[1], torch.bfloat16))
    tiles_2I = list_tiles(depths, lengths, tile_tokens)
    tiles_2I = pad_tiles(tiles_2I, _round_up(tiles_2I.shape[1]), empty=len(table_SP) - 1)
    table, spans, tiles = (copy_to_device(each, device) for each in (table_SP, spans_3S, tiles_2I))
    return table, spans, tiles


def count_padding(trie: Trie) -> int:
    """Last tokens that attend to themselves alone and predict nothing, as `pad_trie` appends them."""
    is_padding_T = (trie.depth_T == 0) & (trie.subtree_end_T == np.arange(trie.num_tokens) + 1)
    is_padding_T[trie.parent_E] = False
    others = np.flatnonzero(~is_padding_T)
    return trie.num_tokens - 1 - int(others[-1]) if len(others) else trie.num_tokens


def _round_up(size: int) -> int:
    return 1 << (size - 1).bit_length()


class _ExactAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, query_norm: Tensor | None, key_norm: Tensor | None,
        prologue: Prologue | None, paths: Tensor, spans: Tensor, tiles: Tensor, table: Tensor,
        tiling: int, window: int, scaling: float, softcap: float,
    ) -> Tensor:  # fmt: skip
        query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
        num_heads, num_tokens = query.shape[1:3]
        keys, values = (each.new_empty((num_tokens, each.shape[1], 1, each.shape[3])) for each in (key, value))
        slots_T = torch.arange(num_tokens, device=query.device)
        log_sums_TH = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=query.device)
        output = run_paged_prefill(
            query, key, value, keys, values, slots_T, paths, spans, tiles, scaling, window, softcap,
            prologue=prologue, log_sums_TH=log_sums_TH,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, query_norm, key_norm, output, log_sums_TH, table)
        ctx.prologue, ctx.options = prologue, (tiling, window, scaling, softcap)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, query_norm, key_norm, output, log_sums_TH, table = ctx.saved_tensors
        prologue, log_sums_HT = ctx.prologue, log_sums_TH.t().contiguous()
        if prologue is None:
            grads = tree_attention_backward(grad, query, key, value, output, log_sums_HT, table, *ctx.options)
            return *grads, *[None] * 11
        angles, pairs = (prologue.cos_1TD, prologue.sin_1TD), ((query, query_norm), (key, key_norm))
        rotated = [norm_and_rotate(heads, angles, norm, prologue.epsilon) for heads, norm in pairs]
        *grads, grad_value = tree_attention_backward(grad, *rotated, value, output, log_sums_HT, table, *ctx.options)
        # side by side, as the product that made query, key and value reads them
        numbers = [query.shape[1], key.shape[1], key.shape[1]]
        parts = query.new_empty((1, query.shape[2], sum(numbers), query.shape[3])).split(numbers, dim=2)
        parts[2].copy_(grad_value.transpose(1, 2))
        zipped = pairs, grads, parts[:2], ctx.needs_input_grad[3:5]
        grad_norms = [
            backward_norm_and_rotate(heads, grad, angles, norm, prologue.epsilon, part, has_weight_grad=needs_weight)
            for (heads, norm), grad, part, needs_weight in zip(*zipped, strict=True)
        ]
        return *(part.transpose(1, 2) for part in parts), *grad_norms, *[None] * 9


def attend_exactly(
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    paths_SP: Tensor,
    spans_3S: Tensor,
    tiles_2I: Tensor,
    table: Tensor,
    tiling: int,
    window: int,
    scaling: float,
    softcap: float,
    prologue: Prologue | None = None,
) -> Tensor:
    """Attention [1, T, H, D]; paths, spans and tiles are those of `build_spans`, the rest is as in `tree_attention`."""
    norms = (None, None) if prologue is None else (prologue.query_norm_D, prologue.key_norm_D)
    return _ExactAttention.apply(
        query_1HTD, key_1KTD, value_1KTD, *norms, prologue, paths_SP, spans_3S, tiles_2I, table, tiling, window,
        scaling, softcap,
    )  # fmt: skip
