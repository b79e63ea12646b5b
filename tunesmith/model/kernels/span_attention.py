"""Attention of spans of tokens over paged keys and values: one order of additions for every token of a context.

A span is a run of consecutive tokens of one context, whose keys and values up to the span's end are in blocks that the
span's row of the block table lists. Each program takes a tile of one span's tokens, with all query heads of one
key-value head, and loops over the context in tiles that begin at multiples of the context tile. Tiles beyond a token's
own position change nothing (their weights are exact zeros), so the result of a token is a function of its context
alone: of neither the batch, nor the span, nor the place in the row. The sampler's prefill uses it, and with
`model.numerics=exact` (`model/forward/exact.py`) the trainer, whose blocks hold one token each, and decode steps, which
are spans of one token: there a program writes the token's key and value itself.

Axes: T tokens of the row, R spans, I tiles, H query heads, K key-value heads, D head size, P blocks, Z block size, Q
(token, query head) pairs of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tunesmith.model.kernels.heads import apply_softcap, load_heads
from tunesmith.model.kernels.launch import pdl_wait
from tunesmith.model.torch_modes import is_exact

LOG2E = tl.constexpr(1.4426950408889634)
MANY_PROGRAMS = 512
"""Programs of a launch from which they hide each other's latency."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Launch parameters of the attention kernel."""

    rows: int
    """(Token, query head) pairs of a tile."""
    tokens: int
    """Context tokens per loop iteration."""
    num_warps: int
    num_stages: int
    """The only parameter that does not change bits."""


def count_tile_rows(size: int, dtype: torch.dtype) -> int:
    """(Token, query head) pairs of a tile of a prefill; with exact numerics as many as the registers of a warp hold."""
    if is_exact():
        return 32 if size <= 128 else 16
    return 128 if dtype != torch.float32 and size <= 128 else 64


def get_tile_tokens(num_groups: int, num_rows: int) -> int:
    """New tokens of one request per tile."""
    return max(1, num_rows // triton.next_power_of_2(num_groups))


def choose_tile_config(
    size: int, dtype: torch.dtype, num_groups: int, num_programs: int, *, is_step: bool
) -> TileConfig:
    """With exact numerics prefills and decode steps have the same context tokens and warps. A warp adds up each of its
    rows in one order, however many it has; a second warp would share the sums of a row."""
    groups_pad, num_rows = triton.next_power_of_2(num_groups), count_tile_rows(size, dtype)
    rows = get_tile_tokens(num_groups, num_rows) * groups_pad
    if dtype == torch.float32 or size > 256:  # tensor cores are not precise enough, or registers too few
        return TileConfig(rows, 16, 8, 2)
    if is_exact():
        rows, num_stages = max(16, groups_pad) if is_step else rows, 2 if num_programs >= MANY_PROGRAMS else 6
        return TileConfig(rows, 32 if size <= 128 else 16, max(groups_pad // 16, 1), num_stages)
    return TileConfig(rows, 64 if size <= 128 else 32, num_rows // 16, 2)


@triton.jit
def _attend_tile(
    maximum, total, acc_QD, query_QD, keys, values, table_row, start, end, positions, head, scale, softcap, window,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The softmax's running maximum (base 2), sum and output after the tokens from `start`, which all rows see unless
    IS_MASKED."""
    places, sizes = start + tl.arange(0, TOKENS), tl.arange(0, SIZE_PAD)
    is_token, is_used = places < end, (sizes < SIZE)[None, :]
    if IS_MASKED:
        is_used = is_token[:, None] & is_used
        blocks = tl.load(table_row + places // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
    else:
        blocks = tl.load(table_row + places // BLOCK_SIZE).to(tl.int64)
    offsets = ((blocks * HEADS + head) * BLOCK_SIZE + places % BLOCK_SIZE)[:, None] * SIZE + sizes[None, :]
    keys_TD = tl.load(keys + offsets, mask=is_used, other=0.0)
    scores = tl.dot(query_QD, tl.trans(keys_TD), input_precision=PRECISION)
    if HAS_SOFTCAP:
        scores = apply_softcap(scores * (scale / LOG2E), softcap, HAS_SOFTCAP) * LOG2E
    else:
        scores = scores * scale
    if IS_MASKED:
        distance = positions[:, None] - places[None, :]
        is_seen = (distance >= 0) & is_token[None, :]
        if HAS_WINDOW:
            is_seen = is_seen & (distance < window)
        scores = tl.where(is_seen, scores, -float("inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_maximum[:, None])
    rescale = tl.exp2(maximum - new_maximum)
    values_TD = tl.load(values + offsets, mask=is_used, other=0.0)
    acc_QD = tl.dot(weights.to(values_TD.dtype), values_TD, acc_QD * rescale[:, None], input_precision=PRECISION)
    return new_maximum, total * rescale + tl.sum(weights, axis=1), acc_QD


@triton.jit(
    do_not_specialize=["table_width"],
    do_not_specialize_on_alignment=["firsts", "starts", "stops", "tile_requests", "tile_offsets"],
)  # one compiled kernel for any number of requests
def span_attention_kernel(
    query, key, value, keys, values, block_table, firsts, starts, stops, tile_requests, tile_offsets,
    cos, sin, query_norm, key_norm, output, log_sums, sinks, scaling, softcap, epsilon, window,
    table_width, query_stride_t, query_stride_h, key_stride_t, key_stride_h, value_stride_t, value_stride_h, cos_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr, PRECISION: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LOG_SUMS: tl.constexpr, HAS_OPEN_TILES: tl.constexpr, IS_STEP: tl.constexpr,
    COPIES: tl.constexpr, QUERIES: tl.constexpr, HAS_PDL: tl.constexpr,
):  # fmt: skip
    """In a decode step each token is a span and a tile, and `starts` are the positions. A head is computed in as many
    `COPIES` as threads take eight elements each, so that norms add in the order of prefills."""
    pdl_wait(HAS_PDL)
    tile, head = tl.program_id(0), tl.program_id(1)
    rows, sizes = tl.arange(0, ROWS), tl.arange(0, SIZE_PAD)
    if IS_STEP:
        request, first, offset = tile, tile, 0
        start_position = tl.load(starts + tile).to(tl.int32)
        stop = start_position + 1
        block = tl.load(block_table + tile * table_width + start_position // BLOCK_SIZE).to(tl.int64)
        place = (block * HEADS + head) * (BLOCK_SIZE * SIZE) + (start_position % BLOCK_SIZE) * SIZE
        copies, token = tl.zeros((COPIES,), tl.int64), tile.to(tl.int64)
        new_keys = load_heads(
            key + token * key_stride_t + head * key_stride_h + copies, cos + token * cos_stride + copies,
            sin + token * cos_stride + copies, key_norm, epsilon, copies == 0, SIZE, SIZE_PAD, HAS_NORM, HAS_ROPE,
        )  # fmt: skip
        tl.store(keys + place + copies[:, None] + sizes[None, :], new_keys, mask=(sizes < SIZE)[None, :])
        new_value = tl.load(value + token * value_stride_t + head * value_stride_h + sizes, mask=sizes < SIZE)
        tl.store(values + place + sizes, new_value, mask=sizes < SIZE)
        tl.debug_barrier()  # the program reads the key and value back
    else:
        request, offset = tl.load(tile_requests + tile), tl.load(tile_offsets + tile)
        first, start_position, stop = tl.load(firsts + request), tl.load(starts + request), tl.load(stops + request)
    positions, groups = start_position + offset + rows // GROUPS_PAD, rows % GROUPS_PAD
    is_row = (positions < stop) & (groups < GROUPS)
    is_size = sizes < SIZE
    places_Q = (first + positions - start_position).to(tl.int64)
    if IS_STEP:
        few_groups = tl.arange(0, QUERIES) % GROUPS_PAD
        places_of_few = first.to(tl.int64) + tl.zeros((QUERIES,), tl.int64)
        few_QD = load_heads(
            query + places_of_few * query_stride_t + (head * GROUPS + few_groups) * query_stride_h,
            cos + places_of_few * cos_stride, sin + places_of_few * cos_stride, query_norm, epsilon,
            few_groups < GROUPS, SIZE, SIZE_PAD, HAS_NORM, HAS_ROPE,
        )  # fmt: skip
        query_QD = tl.broadcast_to(few_QD[None], (ROWS // QUERIES, QUERIES, SIZE_PAD)).reshape(ROWS, SIZE_PAD)
    else:
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
    table_row = block_table + request * table_width
    start_of_mask = start_of_context
    if HAS_OPEN_TILES:  # all rows see these tokens
        start_of_mask = tl.maximum(start_of_context, (start_position + offset + 1) // TOKENS * TOKENS)
        for start in range(start_of_context, start_of_mask, TOKENS):
            maximum, total, acc_QD = _attend_tile(
                maximum, total, acc_QD, query_QD, keys, values, table_row, start, end_of_context, positions, head,
                scaling * LOG2E, softcap, window, HEADS, SIZE, SIZE_PAD, BLOCK_SIZE, TOKENS, HAS_SOFTCAP, HAS_WINDOW,
                False, PRECISION,
            )  # fmt: skip
    for start in range(start_of_mask, end_of_context, TOKENS):
        maximum, total, acc_QD = _attend_tile(
            maximum, total, acc_QD, query_QD, keys, values, table_row, start, end_of_context, positions, head,
            scaling * LOG2E, softcap, window, HEADS, SIZE, SIZE_PAD, BLOCK_SIZE, TOKENS, HAS_SOFTCAP, HAS_WINDOW,
            True, PRECISION,
        )  # fmt: skip
    if HAS_SINKS:
        sink = tl.load(sinks + head * GROUPS + groups, mask=groups < GROUPS, other=0.0).to(tl.float32)
        total += tl.exp2(sink * LOG2E - maximum)
    acc_QD = acc_QD / total[:, None]
    heads_Q = places_Q * HEADS * GROUPS + head * GROUPS + groups
    if HAS_LOG_SUMS:
        tl.store(log_sums + heads_Q, maximum + tl.log2(total), mask=is_row)
    is_output = is_row[:, None] & is_size[None, :]
    tl.store(output + heads_Q[:, None] * SIZE + sizes[None, :], acc_QD.to(output.dtype.element_ty), mask=is_output)
