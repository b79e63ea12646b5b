"""Paged prefill attention: any number of new tokens per request, two kernel launches per layer.

The first kernel writes the new keys and values to their KV-cache blocks, the second attends
(`model/kernels/span_attention.py`).

Axes: T tokens of the row, R requests, I tiles, H query heads, K key-value heads, D head size, P KV-cache blocks,
Z block size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tunesmith.model.kernels.heads import load_heads
from tunesmith.model.kernels.launch import get_launch_options, pdl_wait
from tunesmith.model.kernels.prologue import Prologue, get_prologue_tensors
from tunesmith.model.kernels.span_attention import attend_spans


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
    sinks_H: Tensor | None = None,
    prologue: Prologue | None = None,
) -> Tensor:
    """As `tunesmith.engine.cuda.custom_ops.paged_prefill`, with an optional fused prologue on the heads."""
    num_tokens, size = query_1HTD.shape[2:]
    num_kv_heads, block_size = keys_PKZD.shape[1], keys_PKZD.shape[2]
    size_pad = max(16, triton.next_power_of_2(size))
    cos, sin, query_norm, key_norm = get_prologue_tensors(prologue, query_1HTD)
    epsilon = prologue.epsilon if prologue else 0.0
    has_norm = prologue is not None and prologue.query_norm_D is not None
    _write_kv_cache_kernel[(num_tokens,)](
        key_1KTD, value_1KTD, keys_PKZD, values_PKZD, slot_mapping_T, cos, sin, key_norm, epsilon,
        key_1KTD.stride(2), key_1KTD.stride(1), value_1KTD.stride(2), value_1KTD.stride(1), cos.stride(1),
        HEADS=num_kv_heads, HEADS_PAD=triton.next_power_of_2(num_kv_heads), SIZE=size, SIZE_PAD=size_pad,
        BLOCK_SIZE=block_size, HAS_NORM=has_norm, HAS_ROPE=prologue is not None, num_warps=2,
        **get_launch_options(),
    )  # fmt: skip
    return attend_spans(
        query_1HTD, keys_PKZD, values_PKZD, block_table_RP, spans_3R, tiles_2I,
        scaling=scaling, sliding_window=sliding_window, softcap=softcap,
        prologue=None if prologue is None else (cos, sin, query_norm), has_norm=has_norm, epsilon=epsilon,
        sinks_H=sinks_H,
    )  # fmt: skip
