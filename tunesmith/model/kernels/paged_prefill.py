"""Paged prefill attention: any number of new tokens per request, two kernel launches per layer.

The first kernel writes the new keys and values to their KV-cache blocks, the second attends
(`model/kernels/span_attention.py`), and does both in a decode step with exact numerics.

Axes: T tokens of the row, R requests, I tiles, H query heads, K key-value heads, D head size, P KV-cache blocks,
Z block size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tunesmith.model.kernels.heads import load_heads
from tunesmith.model.kernels.launch import get_launch_options, pdl_wait
from tunesmith.model.kernels.prologue import Prologue, get_prologue_tensors
from tunesmith.model.kernels.span_attention import choose_tile_config, span_attention_kernel
from tunesmith.model.torch_modes import is_exact

THREAD_ELEMENTS = 8
"""Of a head of 16 bits that a thread loads at once, if there are enough."""


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
    log_sums_TH: Tensor | None = None,
) -> Tensor:
    """As `tunesmith.engine.cuda.custom_ops.paged_prefill`, with an optional fused prologue on the heads.

    The sums of the softmax, as logarithms of base 2, are written to `log_sums_TH`; gradients need them.
    """
    _, num_heads, num_tokens, size = query_1HTD.shape
    num_kv_heads, block_size = keys_PKZD.shape[1], keys_PKZD.shape[2]
    num_groups, size_pad = num_heads // num_kv_heads, max(16, triton.next_power_of_2(size))
    cos, sin, query_norm, key_norm = get_prologue_tensors(prologue, query_1HTD)
    epsilon = prologue.epsilon if prologue else 0.0
    is_step, num_tiles = not tiles_2I.numel(), tiles_2I.shape[1] or num_tokens
    key_strides = key_1KTD.stride(2), key_1KTD.stride(1), value_1KTD.stride(2), value_1KTD.stride(1), cos.stride(1)
    options: dict[str, Any] = {
        "HEADS": num_kv_heads, "SIZE": size, "SIZE_PAD": size_pad, "BLOCK_SIZE": block_size,
        "HAS_NORM": prologue is not None and prologue.query_norm_D is not None, "HAS_ROPE": prologue is not None,
        **get_launch_options(),
    }  # fmt: skip
    if not is_step:
        num_rows = THREAD_ELEMENTS * 64 // size_pad if is_exact() else 1
        _write_kv_cache_kernel[(num_tokens,)](
            key_1KTD, value_1KTD, keys_PKZD, values_PKZD, slot_mapping_T, cos, sin, key_norm, epsilon, *key_strides,
            HEADS_PAD=max(triton.next_power_of_2(num_kv_heads), num_rows), num_warps=2, **options,
        )  # fmt: skip
    groups_pad = triton.next_power_of_2(num_groups)
    tile = choose_tile_config(size, query_1HTD.dtype, num_groups, num_tiles * num_kv_heads, is_step=is_step)
    num_copies = max(THREAD_ELEMENTS * 32 * tile.num_warps // size_pad, 1)
    output = torch.empty((1, num_tokens, num_heads, size), dtype=query_1HTD.dtype, device=query_1HTD.device)
    span_attention_kernel[(num_tiles, num_kv_heads)](
        query_1HTD, key_1KTD, value_1KTD, keys_PKZD, values_PKZD, block_table_RP,
        spans_3R[0], spans_3R[1], spans_3R[2], *((spans_3R[0],) * 2 if is_step else tiles_2I),
        cos, sin, query_norm, key_norm, output, output if log_sums_TH is None else log_sums_TH,
        output if sinks_H is None else sinks_H, scaling, softcap, epsilon, sliding_window, block_table_RP.stride(0),
        query_1HTD.stride(2), query_1HTD.stride(1), *key_strides,
        GROUPS=num_groups, GROUPS_PAD=groups_pad, ROWS=tile.rows, TOKENS=tile.tokens,
        HAS_SOFTCAP=softcap > 0, HAS_WINDOW=sliding_window > 0, HAS_SINKS=sinks_H is not None,
        HAS_LOG_SUMS=log_sums_TH is not None, IS_STEP=is_step, COPIES=num_copies, QUERIES=max(groups_pad, num_copies),
        # with exact numerics no tile has other operations than another
        HAS_OPEN_TILES=not (is_exact() or sliding_window),
        PRECISION="ieee" if query_1HTD.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps, num_stages=tile.num_stages, **options,
    )  # fmt: skip
    return output
