"""Attention of spans of tokens over paged keys and values: one order of additions for every token of a context.

A span is a run of consecutive tokens of one context, whose keys and values up to the span's end are in blocks that the
span's row of the block table lists. Each program takes a tile of one span's tokens, with all query heads of one
key-value head, and loops over the context in tiles that begin at multiples of `CONTEXT_TILE`. Tiles beyond a token's
own position change nothing (their weights are exact zeros), so the result of a token is a function of its context
alone: of neither the batch, nor the span, nor the place in the row. The sampler's prefill uses it, and with
`model.numerics=exact` (`model/forward/exact.py`) its decode steps, which are spans of one token, and the trainer, whose
blocks hold one token each.

Axes: T tokens of the row, R spans, I tiles, H query heads, K key-value heads, D head size, P blocks, Z block size, Q
(token, query head) pairs of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tunesmith.model.kernels.heads import apply_softcap, load_heads
from tunesmith.model.kernels.launch import get_launch_options, pdl_wait

QUERY_TILE = 64
"""(Token, query head) pairs per tile."""
CONTEXT_TILE = 64
"""Context tokens per loop iteration."""
SMALL_CONTEXT_TILE = 16
"""The same in float32, where tensor cores are not precise enough, and for large heads, which need more registers."""


@triton.jit(
    do_not_specialize=["table_width"],
    do_not_specialize_on_alignment=["firsts", "starts", "stops", "tile_requests", "tile_offsets"],
)  # one compiled kernel for any number of requests
def _span_attention_kernel(
    query, keys, values, block_table, firsts, starts, stops, tile_requests, tile_offsets,
    cos, sin, query_norm, output, sinks, scaling, softcap, epsilon, window,
    table_width, query_stride_t, query_stride_h, cos_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr, PRECISION: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(HAS_PDL)
    tile, head = tl.program_id(0), tl.program_id(1)
    request, offset = tl.load(tile_requests + tile), tl.load(tile_offsets + tile)
    first, start_position, stop = tl.load(firsts + request), tl.load(starts + request), tl.load(stops + request)
    rows, sizes, tokens = tl.arange(0, ROWS), tl.arange(0, SIZE_PAD), tl.arange(0, TOKENS)
    positions, groups = start_position + offset + rows // GROUPS_PAD, rows % GROUPS_PAD
    is_row = (positions < stop) & (groups < GROUPS)
    is_size = sizes < SIZE
    places_Q = (first + positions - start_position).to(tl.int64)
    query_heads = query + places_Q * query_stride_t + (head * GROUPS + groups) * query_stride_h
    query_QD = load_heads(
        query_heads, cos + places_Q * cos_stride, sin + places_Q * cos_stride, query_norm, epsilon, is_row,
        SIZE, SIZE_PAD, HAS_NORM, HAS_ROPE,
    )  # fmt: skip
    maximum, total = tl.full((ROWS,), -1e30, tl.float32), tl.zeros((ROWS,), tl.float32)
    acc_QD = tl.zeros((ROWS, SIZE_PAD), tl.float32)
    start_of_context = 0
    if HAS_WINDOW:
        # at a border of tiles, as for other queries: the rounding of a sum depends on where its tiles begin
        start_of_context = tl.maximum(start_position + offset - window + 1, 0) // TOKENS * TOKENS
    end_of_context = tl.minimum(start_position + offset + ROWS // GROUPS_PAD, stop)
    for start in range(start_of_context, end_of_context, TOKENS):
        places = start + tokens
        is_token = places < end_of_context
        blocks = tl.load(block_table + request * table_width + places // BLOCK_SIZE, mask=is_token, other=0).to(
            tl.int64
        )
        base = (blocks * HEADS + head) * (BLOCK_SIZE * SIZE) + (places % BLOCK_SIZE) * SIZE
        is_used = is_token[:, None] & is_size[None, :]
        keys_TD = tl.load(keys + base[:, None] + sizes[None, :], mask=is_used, other=0.0)
        scores = tl.dot(query_QD, tl.trans(keys_TD), input_precision=PRECISION) * scaling
        scores = apply_softcap(scores, softcap, HAS_SOFTCAP)
        distance = positions[:, None] - places[None, :]
        is_seen = (distance >= 0) & is_token[None, :]
        if HAS_WINDOW:
            is_seen = is_seen & (distance < window)
        scores = tl.where(is_seen, scores, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_maximum[:, None])
        rescale = tl.exp(maximum - new_maximum)
        total = total * rescale + tl.sum(weights, axis=1)
        values_TD = tl.load(values + base[:, None] + sizes[None, :], mask=is_used, other=0.0)
        acc_QD = tl.dot(weights.to(values_TD.dtype), values_TD, acc_QD * rescale[:, None], input_precision=PRECISION)
        maximum = new_maximum
    if HAS_SINKS:
        sink = tl.load(sinks + head * GROUPS + groups, mask=groups < GROUPS, other=0.0).to(tl.float32)
        total += tl.exp(sink - maximum)
    acc_QD = acc_QD / total[:, None]
    output_places = (places_Q * HEADS * GROUPS + head * GROUPS + groups) * SIZE
    is_output = is_row[:, None] & is_size[None, :]
    tl.store(output + output_places[:, None] + sizes[None, :], acc_QD.to(output.dtype.element_ty), mask=is_output)


def get_tile_tokens(num_groups: int) -> int:
    """New tokens of one request per tile."""
    return max(1, QUERY_TILE // triton.next_power_of_2(num_groups))


def attend_spans(
    query_1HTD: Tensor,
    keys_PKZD: Tensor,
    values_PKZD: Tensor,
    block_table_RP: Tensor,
    spans_3R: Tensor,
    tiles_2I: Tensor,
    *,
    scaling: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    prologue: tuple[Tensor, Tensor, Tensor] | None = None,
    has_norm: bool = False,
    epsilon: float = 0.0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention [1, T, H, D] of query [1, H, T, D]; tokens of no span are left undefined.

    `spans_3R` (int32) holds each span's first token in the row, that token's position, and the position after its last
    token; `tiles_2I` (int32) for each tile its span and the index of its first token in it. `sliding_window` 0 and
    `softcap` 0 mean none. `prologue` (cosines, sines, weight of the head norm) is applied to the query heads first.
    `sinks_H` are those of `AttentionOptions`.
    """
    _, num_heads, num_tokens, size = query_1HTD.shape
    num_kv_heads, block_size = keys_PKZD.shape[1], keys_PKZD.shape[2]
    num_groups = num_heads // num_kv_heads
    cos, sin, query_norm = (query_1HTD,) * 3 if prologue is None else prologue
    is_wide = query_1HTD.dtype == torch.float32
    is_small = is_wide or size > 256
    output = torch.empty((1, num_tokens, num_heads, size), dtype=query_1HTD.dtype, device=query_1HTD.device)
    _span_attention_kernel[(tiles_2I.shape[1], num_kv_heads)](
        query_1HTD, keys_PKZD, values_PKZD, block_table_RP,
        spans_3R[0], spans_3R[1], spans_3R[2], tiles_2I[0], tiles_2I[1],
        cos, sin, query_norm, output, output if sinks_H is None else sinks_H,
        scaling, softcap, epsilon, sliding_window, block_table_RP.stride(0),
        query_1HTD.stride(2), query_1HTD.stride(1), cos.stride(1),
        HEADS=num_kv_heads, GROUPS=num_groups, GROUPS_PAD=triton.next_power_of_2(num_groups), SIZE=size,
        SIZE_PAD=max(16, triton.next_power_of_2(size)), BLOCK_SIZE=block_size, ROWS=QUERY_TILE,
        TOKENS=SMALL_CONTEXT_TILE if is_small else CONTEXT_TILE,
        HAS_SOFTCAP=softcap > 0, HAS_WINDOW=sliding_window > 0, HAS_NORM=has_norm, HAS_ROPE=prologue is not None,
        HAS_SINKS=sinks_H is not None,
        PRECISION="ieee" if is_wide else "tf32", num_warps=8 if is_small else 4, num_stages=2 if is_small else 3,
        **get_launch_options(),
    )  # fmt: skip
    return output
