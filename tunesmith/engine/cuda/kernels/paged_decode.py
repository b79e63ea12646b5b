"""Paged decode attention: one new token per request; the same kernel writes its key and value to the cache.

One program handles one request and one key-value head with all its query heads. Its online softmax (Milakov and
Gimelshein, 2018) starts with the new token, whose key and value it writes to their KV-cache block, and then loops over
the context in tiles. With few requests the context is split over several programs, and a second kernel reduces the
partial results. RMS norm and rotary embedding of query and key heads can be fused into the same kernel.

Axes: R requests, H query heads, K key-value heads, G query heads of one key-value head, D head size, P KV-cache blocks,
Z block size, T tokens of a tile, S splits of the context.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tunesmith.engine.cuda.custom_ops import Prologue
from tunesmith.engine.cuda.kernels.heads import apply_softcap, get_prologue_tensors, load_heads
from tunesmith.engine.cuda.kernels.launch import get_launch_options, pdl_wait

MAX_SPLITS = 32
MANY_PROGRAMS = 2500
"""From this number of programs on, they hide each other's memory latency, and fewer pipeline stages are enough."""


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Launch parameters of the decode kernel."""

    tile: int
    """Context tokens per loop iteration."""
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Per thread; a lower limit raises occupancy."""


@triton.jit
def _load_tile(
    keys, values, block_table, head, start, is_token,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
    IS_LARGE: tl.constexpr,
):  # fmt: skip
    """Keys and values [T, D] of a tile; where `is_token` is false, keys are undefined and values are 0."""
    sizes, tokens = tl.arange(0, SIZE_PAD), tl.arange(0, TOKENS)
    # a tile that does not cross a block boundary is contiguous in memory
    if BLOCK_SIZE % TOKENS == 0 and SIZE == SIZE_PAD:
        block = tl.load(block_table + start // BLOCK_SIZE)
        if IS_LARGE:
            block = block.to(tl.int64)
        base = (block * HEADS + head) * (BLOCK_SIZE * SIZE) + (start % BLOCK_SIZE) * SIZE
        offsets = base + tokens[:, None] * SIZE + sizes[None, :]
        keys_TD = tl.load(keys + offsets)
        values_TD = tl.load(values + offsets, mask=is_token[:, None], other=0.0)
    else:
        offsets = start + tokens
        blocks = tl.load(block_table + offsets // BLOCK_SIZE, mask=is_token, other=0)
        if IS_LARGE:
            blocks = blocks.to(tl.int64)
        base = (blocks * HEADS + head) * (BLOCK_SIZE * SIZE) + (offsets % BLOCK_SIZE) * SIZE
        is_used = is_token[:, None] & (sizes < SIZE)[None, :]
        keys_TD = tl.load(keys + base[:, None] + sizes[None, :], mask=is_used, other=0.0)
        values_TD = tl.load(values + base[:, None] + sizes[None, :], mask=is_used, other=0.0)
    return keys_TD, values_TD


@triton.jit
def _accumulate_context(
    query_GD, maximum, total, acc_GD, keys, values, block_table, head, begin_context, first, end_context,
    scaling, softcap,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, IS_LARGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Continue an online softmax over part of a context: maximum and sum of weights [G], weighted values [G, D].

    Tokens of the first tile before `first` lie outside the sliding window.
    """
    for start in range(begin_context, end_context, TOKENS):
        offsets = start + tl.arange(0, TOKENS)
        is_token = (offsets >= first) & (offsets < end_context)
        keys_TD, values_TD = _load_tile(
            keys, values, block_table, head, start, is_token, HEADS, SIZE, SIZE_PAD, BLOCK_SIZE, TOKENS, IS_LARGE
        )
        scores = tl.dot(query_GD, tl.trans(keys_TD), input_precision=PRECISION) * scaling
        scores = apply_softcap(scores, softcap, HAS_SOFTCAP)
        # finite, since -inf minus -inf would be NaN where no token of a tile is inside the window
        scores = tl.where(is_token[None, :], scores, -1e30)
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_maximum[:, None])
        rescale = tl.exp(maximum - new_maximum)
        total = total * rescale + tl.sum(weights, axis=1)
        acc_GD = tl.dot(weights.to(values_TD.dtype), values_TD, acc_GD * rescale[:, None], input_precision=PRECISION)
        maximum = new_maximum
    return maximum, total, acc_GD


@triton.jit(do_not_specialize=["num_splits"])  # one compiled kernel for any number of requests
def _paged_decode_kernel(
    query, key, value, keys, values, block_table, positions, cos, sin, query_norm, key_norm, output, maxima, sums,
    scaling, softcap, epsilon, window, table_width, num_splits,
    query_stride_r, query_stride_h, key_stride_r, key_stride_h, value_stride_r, value_stride_h, cos_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr, IS_LARGE: tl.constexpr, PRECISION: tl.constexpr,
    HAS_PDL: tl.constexpr,
):  # fmt: skip
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups, sizes = tl.arange(0, GROUPS_PAD), tl.arange(0, SIZE_PAD)
    is_group, is_size, one = groups < GROUPS, sizes < SIZE, tl.zeros((1,), tl.int32)
    position = tl.load(positions + request)  # the previous kernel, which may still run, does not write it
    pdl_wait(HAS_PDL)
    block_table, cos, sin = block_table + request * table_width, cos + request * cos_stride, sin + request * cos_stride
    query_heads = query + request * query_stride_r + (head * GROUPS + groups) * query_stride_h
    query_GD = load_heads(
        query_heads, cos + 0 * groups, sin + 0 * groups, query_norm, epsilon, is_group,
        SIZE, SIZE_PAD, HAS_NORM, HAS_ROPE,
    )  # fmt: skip
    maximum, total = tl.full((GROUPS_PAD,), -1e30, tl.float32), tl.zeros((GROUPS_PAD,), tl.float32)
    acc_GD = tl.zeros((GROUPS_PAD, SIZE_PAD), tl.float32)
    # The new token comes from registers: it is not read back from the cache, where the store may not be visible yet.
    # Only the first split counts it.
    if split == 0:
        key_1D = load_heads(
            key + request * key_stride_r + head * key_stride_h + one, cos + one, sin + one, key_norm, epsilon, one == 0,
            SIZE, SIZE_PAD, HAS_NORM, HAS_ROPE,
        )  # fmt: skip
        new_key = tl.sum(key_1D.to(tl.float32), axis=0)
        new_value = tl.load(value + request * value_stride_r + head * value_stride_h + sizes, mask=is_size, other=0.0)
        block = tl.load(block_table + position // BLOCK_SIZE).to(tl.int64)
        offset = (block * HEADS + head) * (BLOCK_SIZE * SIZE) + (position % BLOCK_SIZE) * SIZE
        tl.store(keys + offset + sizes, new_key.to(keys.dtype.element_ty), mask=is_size)
        tl.store(values + offset + sizes, new_value, mask=is_size)
        score = tl.sum(query_GD.to(tl.float32) * new_key[None, :], axis=1) * scaling
        maximum = apply_softcap(score, softcap, HAS_SOFTCAP)
        total += 1.0
        acc_GD += new_value.to(tl.float32)[None, :]
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0)
    aligned = first // TOKENS * TOKENS
    # splits consist of whole tiles and start at a multiple of one, so that no tile crosses a cache block
    per_split = tl.cdiv(tl.cdiv(position - aligned, TOKENS), num_splits) * TOKENS
    start = aligned + split * per_split
    maximum, total, acc_GD = _accumulate_context(
        query_GD, maximum, total, acc_GD, keys, values, block_table, head,
        start, first, tl.minimum(start + per_split, position),
        scaling, softcap, HEADS, SIZE, SIZE_PAD, BLOCK_SIZE, TOKENS, HAS_SOFTCAP, IS_LARGE, PRECISION,
    )  # fmt: skip
    row = (request * HEADS + head) * num_splits + split
    if num_splits == 1:
        acc_GD = acc_GD / total[:, None]
    else:
        tl.store(maxima + row * GROUPS + groups, maximum, mask=is_group)
        tl.store(sums + row * GROUPS + groups, total, mask=is_group)
    offsets_GD = (row * GROUPS + groups)[:, None] * SIZE + sizes[None, :]
    tl.store(output + offsets_GD, acc_GD.to(output.dtype.element_ty), mask=is_group[:, None] & is_size[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def _reduce_splits_kernel(
    parts, maxima, sums, output, num_splits,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, MAX_SPLITS: tl.constexpr, HAS_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(HAS_PDL)
    row, group = tl.program_id(0), tl.program_id(1)
    splits, sizes = tl.arange(0, MAX_SPLITS), tl.arange(0, SIZE_PAD)
    is_split, is_size = splits < num_splits, sizes < SIZE
    heads = (row * num_splits + splits) * GROUPS + group
    maximum = tl.load(maxima + heads, mask=is_split, other=-1e30)
    scale = tl.exp(maximum - tl.max(maximum, axis=0))
    total = tl.sum(tl.load(sums + heads, mask=is_split, other=0.0) * scale, axis=0)
    is_used = is_split[:, None] & is_size[None, :]
    parts_SD = tl.load(parts + heads[:, None] * SIZE + sizes[None, :], mask=is_used, other=0.0)
    acc = tl.sum(parts_SD * scale[:, None], axis=0) / total
    tl.store(output + (row * GROUPS + group) * SIZE + sizes, acc.to(output.dtype.element_ty), mask=is_size)


def run_paged_decode(
    query_1HRD: Tensor,
    key_1KRD: Tensor,
    value_1KRD: Tensor,
    keys_PKZD: Tensor,
    values_PKZD: Tensor,
    block_table_RP: Tensor,
    positions_R: Tensor,
    scaling: float,
    sliding_window: int,
    softcap: float,
    prologue: Prologue | None = None,
    *,
    config: KernelConfig | None = None,
) -> Tensor:
    """Implement `tunesmith.engine.cuda.custom_ops.paged_decode`, with an optional fused prologue on the heads."""
    _, num_heads, num_requests, size = query_1HRD.shape
    num_kv_heads, block_size = keys_PKZD.shape[1], keys_PKZD.shape[2]
    num_groups, size_pad = num_heads // num_kv_heads, max(16, triton.next_power_of_2(size))
    num_splits = choose_num_splits(num_requests, num_kv_heads, get_num_sms())
    if config is None:
        config = choose_kernel_config(size_pad, query_1HRD.dtype, block_size, num_requests * num_kv_heads * num_splits)
    output = torch.empty((1, num_requests, num_heads, size), dtype=query_1HRD.dtype, device=query_1HRD.device)
    parts, maxima, sums = output, output, output
    if num_splits > 1:
        part_shape = (num_requests, num_kv_heads, num_splits, num_groups)
        parts = torch.empty((*part_shape, size), dtype=torch.float32, device=query_1HRD.device)
        maxima, sums = parts.new_empty(part_shape), parts.new_empty(part_shape)
    cos, sin, query_norm, key_norm = get_prologue_tensors(prologue, query_1HRD)
    options = get_launch_options()
    # The number of splits follows from the batch size alone, which a graph fixes, not from context lengths, which
    # differ at each replay.
    _paged_decode_kernel[(num_requests, num_kv_heads, num_splits)](
        query_1HRD, key_1KRD, value_1KRD, keys_PKZD, values_PKZD, block_table_RP, positions_R, cos, sin,
        query_norm, key_norm, parts, maxima, sums,
        scaling, softcap, prologue.epsilon if prologue else 0.0, sliding_window, block_table_RP.stride(0), num_splits,
        query_1HRD.stride(2), query_1HRD.stride(1), key_1KRD.stride(2), key_1KRD.stride(1),
        value_1KRD.stride(2), value_1KRD.stride(1), cos.stride(1),
        HEADS=num_kv_heads, GROUPS=num_groups, GROUPS_PAD=max(16, triton.next_power_of_2(num_groups)),
        SIZE=size, SIZE_PAD=size_pad, BLOCK_SIZE=block_size, TOKENS=config.tile,
        HAS_SOFTCAP=softcap > 0, HAS_WINDOW=sliding_window > 0, HAS_ROPE=prologue is not None,
        HAS_NORM=prologue is not None and prologue.query_norm_D is not None, IS_LARGE=keys_PKZD.numel() >= 2**31,
        PRECISION="ieee" if query_1HRD.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.max_registers, **options,
    )  # fmt: skip
    if num_splits > 1:
        _reduce_splits_kernel[(num_requests * num_kv_heads, num_groups)](
            parts, maxima, sums, output, num_splits,
            GROUPS=num_groups, SIZE=size, SIZE_PAD=size_pad, MAX_SPLITS=MAX_SPLITS, **options,
        )  # fmt: skip
    return output


def choose_kernel_config(size: int, dtype: torch.dtype, block_size: int, num_programs: int) -> KernelConfig:
    """Fastest on an H200: tiles of one block, read by one warp; float32 only serves comparisons."""
    if dtype == torch.float32:
        return KernelConfig(16, 4, 2)
    if block_size % 16:
        return KernelConfig(32, 4, 4)
    num_stages = 6 if num_programs < MANY_PROGRAMS else 4
    return KernelConfig(16, 1, num_stages, max_registers=80 if size <= 64 else 128 if size <= 128 else None)


def choose_num_splits(num_requests: int, num_kv_heads: int, num_sms: int) -> int:
    """The smallest power of two with two programs per multiprocessor, at most `MAX_SPLITS`."""
    num_splits = 1
    while num_splits < MAX_SPLITS and num_requests * num_kv_heads * num_splits < 2 * num_sms:
        num_splits *= 2
    return num_splits


@cache
def get_num_sms() -> int:
    """Streaming multiprocessors of the current device."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


torch.library.impl("tunesmith::paged_decode", "CUDA")(run_paged_decode)
