"""Tree attention with the sampler's order of additions (`model.numerics=exact`); its backward is `tree_attention`'s.

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
from tunesmith.model.arrays import concatenate_ranges, copy_to_device
from tunesmith.model.kernels.paged_prefill import run_paged_prefill
from tunesmith.model.kernels.prologue import Prologue
from tunesmith.model.kernels.span_attention import get_tile_tokens
from tunesmith.trainer.tree_attention.cpu import split_segments
from tunesmith.trainer.tree_attention.kernels.tree_attention import tree_attention_backward


def build_spans(trie: Trie, num_groups: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The chains of a trie as `attend_spans` takes them: block table [S, P], spans [3, S], tiles [2, I].

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
    tile_tokens = get_tile_tokens(num_groups)
    num_tiles = -(-lengths // tile_tokens)
    tiles_2I = np.full((2, _round_up(int(num_tiles.sum()))), len(table_SP) - 1, np.int32)
    tiles_2I[0, : num_tiles.sum()] = np.repeat(np.arange(len(chains)), num_tiles)
    tiles_2I[1, : num_tiles.sum()] = concatenate_ranges(np.zeros_like(lengths), num_tiles) * tile_tokens
    table, spans, tiles = (copy_to_device(each, device) for each in (table_SP, spans_3S, tiles_2I))
    return table, spans, tiles


def _round_up(size: int) -> int:
    return 1 << (size - 1).bit_length()


class _ExactAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        prologue: Prologue | None,
        spans: tuple[Tensor, ...],
        table: Tensor,
        options: tuple[Any, ...],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *norms: Tensor | None,
    ) -> Tensor:
        _, window, scaling, softcap = options
        query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
        num_tokens = query.shape[2]
        log_sums_HT = torch.zeros(query.shape[1:3], dtype=torch.float32, device=query.device)
        keys, values = (each.new_empty((num_tokens, each.shape[1], 1, each.shape[3])) for each in (key, value))
        slots_T = torch.arange(num_tokens, device=query.device)
        output = run_paged_prefill(
            query, key, value, keys, values, slots_T, *spans, scaling, window, softcap, prologue, log_sums_HT
        )
        ctx.save_for_backward(query, key, value, output, log_sums_HT, table)
        ctx.prologue, ctx.options = prologue, options
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (query, key, *saved), prologue = ctx.saved_tensors, ctx.prologue
        if prologue is None:
            return *(None,) * 4, *tree_attention_backward(grad, query, key, *saved, *ctx.options), None, None
        angles, epsilon = (prologue.cos_1TD, prologue.sin_1TD), prologue.epsilon
        weights = [None if each is None else each.detach() for each in (prologue.query_norm_D, prologue.key_norm_D)]
        heads = list(zip((query, key), weights, strict=True))
        rotated = [rotate_heads(each, weight, *angles, epsilon) for each, weight in heads]
        *grads, grad_value = tree_attention_backward(grad, *rotated, *saved, *ctx.options)
        found = [compute_head_grads(grad, *each, *angles, epsilon) for grad, each in zip(grads, heads, strict=True)]
        (grad_query, of_query_norm), (grad_key, of_key_norm) = found
        return *(None,) * 4, grad_query, grad_key, grad_value, of_query_norm, of_key_norm


def attend_exactly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    paths: Tensor,
    spans: Tensor,
    tiles: Tensor,
    table: Tensor,
    steps: int,
    window: int,
    scaling: float,
    softcap: float,
    prologue: Prologue | None = None,
) -> Tensor:
    """Take query [1, H, T, D], key and value [1, K, T, D]; return [1, T, H, D].

    `paths`, `spans` and `tiles` are those of `build_spans`, the other options those of `tree_attention`.
    """
    norms = (None, None) if prologue is None else (prologue.query_norm_D, prologue.key_norm_D)
    options = steps, window, scaling, softcap
    return _ExactAttention.apply(prologue, (paths, spans, tiles), table, options, query, key, value, *norms)


@torch.compile(dynamic=True)
def rotate_heads(x_1HTD: Tensor, norm_D: Tensor | None, cos_1TD: Tensor, sin_1TD: Tensor, epsilon: float) -> Tensor:
    """What the prologue computes."""
    wide = x_1HTD.float()
    if norm_D is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * norm_D.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos_1TD[:, None] + torch.cat((-second, first), dim=-1) * sin_1TD[:, None]).to(x_1HTD.dtype)


@torch.compile(dynamic=True)
def compute_head_grads(
    grad_1HTD: Tensor, x_1HTD: Tensor, norm_D: Tensor | None, cos_1TD: Tensor, sin_1TD: Tensor, epsilon: float
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the input and the norm's weight of `rotate_heads`."""
    first, second = (grad_1HTD.float() * sin_1TD[:, None]).chunk(2, dim=-1)
    grad = grad_1HTD.float() * cos_1TD[:, None] + torch.cat((second, -first), dim=-1)
    return (grad.to(x_1HTD.dtype), None) if norm_D is None else norm_grads(grad, x_1HTD, norm_D, epsilon)


def norm_grads(grad: Tensor, x: Tensor, weight_C: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Gradients of the input and the weight of an RMS norm."""
    wide, grad = x.float(), grad.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    normed, scaled = wide * inverse, grad * weight_C.float()
    grad_x = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), (grad * normed).flatten(0, -2).sum(0)


compute_norm_grads = torch.compile(norm_grads, dynamic=True)
