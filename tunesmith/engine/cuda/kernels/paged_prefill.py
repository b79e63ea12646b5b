"""Paged prefill attention: any number of new tokens per request, two kernel launches per layer.

The first kernel writes the new keys and values to their KV-cache blocks. In the second, each program takes a tile of
one request's new tokens, with all query heads of one key-value head, and loops over the request's blocks up to the
tile's last token; cached and new tokens are read in the same way. Requests of any lengths are concatenated in one row.

Axes: T tokens of the row, R requests, I tiles, H query heads, K key-value heads, D head size, P KV-cache blocks,
Z block size, Q (token, query head) pairs of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tunesmith.engine.cuda.custom_ops import Prologue
from tunesmith.engine.cuda.kernels.heads import apply_softcap, get_prologue_tensors, load_heads
from tunesmith.engine.cuda.kernels.launch import get_launch_options, pdl_wait

QUERY_TILE = 64
"""(Token, query head) pairs per tile."""
CONTEXT_TILE = 64
"""Context tokens per loop iteration."""
FLOAT32_CONTEXT_TILE = 16
"""The same in float32, where tensor cores are not precise enough and more registers are needed."""


@triton.jit
def _write_kv_cache_kernel(
    key, value, keys, values, slot_mapping, cos, sin, key_norm, epsilon,
    key_stride_t, key_stride_h, value_stride_t, value_stride_h, cos_stride,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr, HAS_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(HAS_PDL)
    token = tl.program_id(0).to(tl.int64)
    heads, sizes = tl.arange(0, HEADS_PAD), tl.arange(0, SIZE_PAD)
    is_head = heads < HEADS
    is_used = is_head[:, None] & (sizes < SIZE)[None, :]
    slot = tl.load(slot_mapping + token)
    blocks = (slot // BLOCK_SIZE) * HEADS + heads
    places = blocks[:, None] * (BLOCK_SIZE * SIZE) + (slot % BLOCK_SIZE) * SIZE + sizes[None, :]
    cos_offsets = tl.zeros((HEADS_PAD,), tl.int64) + token * cos_stride
    new_keys = load_heads(
        key + token * key_stride_t + heads * key_stride_h, cos + cos_offsets, sin + cos_offsets,
        key_norm, epsilon, is_head, SIZE, SIZE_PAD, HAS_NORM, HAS_ROPE,
    )  # fmt: skip
    tl.store(keys + places, new_keys, mask=is_used)
    value_places = token * value_stride_t + heads[:, None] * value_stride_h + sizes[None, :]
    tl.store(values + places, tl.load(value + value_places, mask=is_used), mask=is_used)


@triton.jit(
    do_not_specialize=["table_width"],
    do_not_specialize_on_alignment=["firsts", "starts", "stops", "tile_requests", "tile_offsets"],
)  # one compiled kernel for any number of requests
def _paged_prefill_kernel(
    query, keys, values, block_table, firsts, starts, stops, tile_requests, tile_offsets, cos, sin, query_norm, output,
    scaling, softcap, epsilon, window, table_width, query_stride_t, query_stride_h, cos_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr, PRECISION: tl.constexpr,
    HAS_PDL: tl.constexpr,
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
        start_of_context = tl.maximum(start_position + offset - window + 1, 0)
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
    acc_QD = acc_QD / total[:, None]
    output_places = (places_Q * HEADS * GROUPS + head * GROUPS + groups) * SIZE
    is_output = is_row[:, None] & is_size[None, :]
    tl.store(output + output_places[:, None] + sizes[None, :], acc_QD.to(output.dtype.element_ty), mask=is_output)


def get_tile_tokens(num_groups: int) -> int:
    """New tokens of one request per tile."""
    return max(1, QUERY_TILE // triton.next_power_of_2(num_groups))


def run_paged_prefill(
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    keys_PKZD: Tensor,
    values_PKZD: Tensor,
    slot_mapping_T: Tensor,
    block_table_RP: Tensor,
    spans_3R: Tensor,
    tiles_2I: Tensor,
    scaling: float,
    sliding_window: int,
    softcap: float,
    prologue: Prologue | None = None,
) -> Tensor:
    """Implement `tunesmith.engine.cuda.custom_ops.paged_prefill`, with an optional fused prologue on the heads."""
    _, num_heads, num_tokens, size = query_1HTD.shape
    num_kv_heads, block_size = keys_PKZD.shape[1], keys_PKZD.shape[2]
    num_groups, size_pad = num_heads // num_kv_heads, max(16, triton.next_power_of_2(size))
    cos, sin, query_norm, key_norm = get_prologue_tensors(prologue, query_1HTD)
    epsilon = prologue.epsilon if prologue else 0.0
    has_norm = prologue is not None and prologue.query_norm_D is not None
    is_exact = query_1HTD.dtype == torch.float32
    options = get_launch_options()
    _write_kv_cache_kernel[(num_tokens,)](
        key_1KTD, value_1KTD, keys_PKZD, values_PKZD, slot_mapping_T, cos, sin, key_norm, epsilon,
        key_1KTD.stride(2), key_1KTD.stride(1), value_1KTD.stride(2), value_1KTD.stride(1), cos.stride(1),
        HEADS=num_kv_heads, HEADS_PAD=triton.next_power_of_2(num_kv_heads), SIZE=size, SIZE_PAD=size_pad,
        BLOCK_SIZE=block_size, HAS_NORM=has_norm, HAS_ROPE=prologue is not None, num_warps=2, **options,
    )  # fmt: skip
    output = torch.empty((1, num_tokens, num_heads, size), dtype=query_1HTD.dtype, device=query_1HTD.device)
    _paged_prefill_kernel[(tiles_2I.shape[1], num_kv_heads)](
        query_1HTD, keys_PKZD, values_PKZD, block_table_RP,
        spans_3R[0], spans_3R[1], spans_3R[2], tiles_2I[0], tiles_2I[1],
        cos, sin, query_norm, output, scaling, softcap, epsilon, sliding_window, block_table_RP.stride(0),
        query_1HTD.stride(2), query_1HTD.stride(1), cos.stride(1),
        HEADS=num_kv_heads, GROUPS=num_groups, GROUPS_PAD=triton.next_power_of_2(num_groups), SIZE=size,
        SIZE_PAD=size_pad, BLOCK_SIZE=block_size, ROWS=QUERY_TILE,
        TOKENS=FLOAT32_CONTEXT_TILE if is_exact else CONTEXT_TILE,
        HAS_SOFTCAP=softcap > 0, HAS_WINDOW=sliding_window > 0, HAS_NORM=has_norm, HAS_ROPE=prologue is not None,
        PRECISION="ieee" if is_exact else "tf32", num_warps=8 if is_exact else 4, num_stages=2 if is_exact else 3,
        **options,
    )  # fmt: skip
    return output


torch.library.impl("tunesmith::paged_prefill", "CUDA")(run_paged_prefill)
