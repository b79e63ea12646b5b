"""Attention of one new token a request over paged keys and values, written by the same kernel.

One program serves one request and one key-value head, with all its query heads: an online softmax (Milakov and
Gimelshein, 2018) begins with the new token, whose key and value are written into their page, and goes over the context
in blocks. Where requests are few, the context is split over several programs and a second kernel reduces their parts.
The RMS norm of query and key heads and their rotary embedding may be done in the same kernel.

Axes: R requests, H query heads, K key-value heads, G query heads of one key-value head, D head size, Z page size,
S splits of the context.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tunesmith.engine.cuda.custom_ops import Prologue
from tunesmith.engine.cuda.kernels.heads import cap_scores, get_prologue_tensors, make_heads_ready
from tunesmith.engine.cuda.kernels.launch import begin, get_launch_options

MAX_SPLITS = 32
MANY_PROGRAMS = 2500
"""So many hide each other's waits for memory, and want less of it in flight each."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How programs go over a context."""

    block: int
    """Tokens of one step of the loop."""
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    """Of one thread; fewer let more programs run side by side."""


@triton.jit
def _load_tile(
    keys, values, table, head, start, is_token,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
    IS_LARGE: tl.constexpr,
):  # fmt: skip
    """Keys and values [T, D] of some tokens; where there is no token a key may be anything, and values are 0."""
    sizes, tokens = tl.arange(0, SIZE_PAD), tl.arange(0, TOKENS)
    # a tile that begins where a part of a page does is one piece of memory
    if PAGE % TOKENS == 0 and SIZE == SIZE_PAD:
        page = tl.load(table + start // PAGE)
        if IS_LARGE:
            page = page.to(tl.int64)
        base = (page * HEADS + head) * (PAGE * SIZE) + (start % PAGE) * SIZE
        places = base + tokens[:, None] * SIZE + sizes[None, :]
        keys_TD = tl.load(keys + places)
        values_TD = tl.load(values + places, mask=is_token[:, None], other=0.0)
    else:
        places = start + tokens
        pages = tl.load(table + places // PAGE, mask=is_token, other=0)
        if IS_LARGE:
            pages = pages.to(tl.int64)
        base = (pages * HEADS + head) * (PAGE * SIZE) + (places % PAGE) * SIZE
        is_used = is_token[:, None] & (sizes < SIZE)[None, :]
        keys_TD = tl.load(keys + base[:, None] + sizes[None, :], mask=is_used, other=0.0)
        values_TD = tl.load(values + base[:, None] + sizes[None, :], mask=is_used, other=0.0)
    return keys_TD, values_TD


@triton.jit
def _read_context(
    query_GD, maximum, total, mixed_GD, keys, values, table, head, begin_context, first, end_context, scaling, softcap,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, IS_LARGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Go on with maximum and sum of weights [G], and the sum of weighted values [G, D], over part of a context.

    Tokens before `first`, in the first tile, are none of the window's.
    """
    for start in range(begin_context, end_context, TOKENS):
        places = start + tl.arange(0, TOKENS)
        is_token = (places >= first) & (places < end_context)
        keys_TD, values_TD = _load_tile(
            keys, values, table, head, start, is_token, HEADS, SIZE, SIZE_PAD, PAGE, TOKENS, IS_LARGE
        )
        scores = tl.dot(query_GD, tl.trans(keys_TD), input_precision=PRECISION) * scaling
        scores = cap_scores(scores, softcap, HAS_SOFTCAP)
        scores = tl.where(is_token[None, :], scores, -1e30)
        higher = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(maximum - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        mixed_GD = tl.dot(weights.to(values_TD.dtype), values_TD, mixed_GD * shrink[:, None], input_precision=PRECISION)
        maximum = higher
    return maximum, total, mixed_GD


@triton.jit(do_not_specialize=["num_splits"])  # one kernel for any number of requests
def _attend_context(
    query, key, value, keys, values, table, positions, cos, sin, query_norm, key_norm, output, maxima, sums,
    scaling, softcap, epsilon, window, table_width, num_splits,
    query_stride_r, query_stride_h, key_stride_r, key_stride_h, value_stride_r, value_stride_h, cos_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
    PAGE: tl.constexpr, TOKENS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr, IS_LARGE: tl.constexpr, PRECISION: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):  # fmt: skip
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups, sizes = tl.arange(0, GROUPS_PAD), tl.arange(0, SIZE_PAD)
    is_group, is_size, one = groups < GROUPS, sizes < SIZE, tl.zeros((1,), tl.int32)
    position = tl.load(positions + request)  # was there before the kernel that may still run
    begin(IS_CHAINED)
    table, cos, sin = table + request * table_width, cos + request * cos_stride, sin + request * cos_stride
    query_heads = query + request * query_stride_r + (head * GROUPS + groups) * query_stride_h
    query_GD = make_heads_ready(
        query_heads, cos + 0 * groups, sin + 0 * groups, query_norm, epsilon, is_group,
        SIZE, SIZE_PAD, HAS_NORM, HAS_ROPE,
    )  # fmt: skip
    maximum, total = tl.full((GROUPS_PAD,), -1e30, tl.float32), tl.zeros((GROUPS_PAD,), tl.float32)
    mixed_GD = tl.zeros((GROUPS_PAD, SIZE_PAD), tl.float32)
    if split == 0:
        key_1D = make_heads_ready(
            key + request * key_stride_r + head * key_stride_h + one, cos + one, sin + one, key_norm, epsilon, one == 0,
            SIZE, SIZE_PAD, HAS_NORM, HAS_ROPE,
        )  # fmt: skip
        new_key = tl.sum(key_1D.to(tl.float32), axis=0)
        new_value = tl.load(value + request * value_stride_r + head * value_stride_h + sizes, mask=is_size, other=0.0)
        page = tl.load(table + position // PAGE).to(tl.int64)
        place = (page * HEADS + head) * (PAGE * SIZE) + (position % PAGE) * SIZE
        tl.store(keys + place + sizes, new_key.to(keys.dtype.element_ty), mask=is_size)
        tl.store(values + place + sizes, new_value, mask=is_size)
        score = tl.sum(query_GD.to(tl.float32) * new_key[None, :], axis=1) * scaling
        maximum = cap_scores(score, softcap, HAS_SOFTCAP)
        total += 1.0
        mixed_GD += new_value.to(tl.float32)[None, :]
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0)
    aligned = first // TOKENS * TOKENS
    per_split = tl.cdiv(tl.cdiv(position - aligned, TOKENS), num_splits) * TOKENS
    start = aligned + split * per_split
    maximum, total, mixed_GD = _read_context(
        query_GD, maximum, total, mixed_GD, keys, values, table, head,
        start, first, tl.minimum(start + per_split, position),
        scaling, softcap, HEADS, SIZE, SIZE_PAD, PAGE, TOKENS, HAS_SOFTCAP, IS_LARGE, PRECISION,
    )  # fmt: skip
    row = (request * HEADS + head) * num_splits + split
    if num_splits == 1:
        mixed_GD = mixed_GD / total[:, None]
    else:
        tl.store(maxima + row * GROUPS + groups, maximum, mask=is_group)
        tl.store(sums + row * GROUPS + groups, total, mask=is_group)
    places_GD = (row * GROUPS + groups)[:, None] * SIZE + sizes[None, :]
    tl.store(output + places_GD, mixed_GD.to(output.dtype.element_ty), mask=is_group[:, None] & is_size[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def _reduce_splits(
    parts, maxima, sums, output, num_splits,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, MOST: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    begin(IS_CHAINED)
    row, group = tl.program_id(0), tl.program_id(1)
    splits, sizes = tl.arange(0, MOST), tl.arange(0, SIZE_PAD)
    is_split, is_size = splits < num_splits, sizes < SIZE
    heads = (row * num_splits + splits) * GROUPS + group
    maximum = tl.load(maxima + heads, mask=is_split, other=-1e30)
    scale = tl.exp(maximum - tl.max(maximum, axis=0))
    total = tl.sum(tl.load(sums + heads, mask=is_split, other=0.0) * scale, axis=0)
    is_used = is_split[:, None] & is_size[None, :]
    parts_SD = tl.load(parts + heads[:, None] * SIZE + sizes[None, :], mask=is_used, other=0.0)
    mixed = tl.sum(parts_SD * scale[:, None], axis=0) / total
    tl.store(output + (row * GROUPS + group) * SIZE + sizes, mixed.to(output.dtype.element_ty), mask=is_size)


def attend_decoding(
    query_1HRD: Tensor,
    key_1KRD: Tensor,
    value_1KRD: Tensor,
    keys_PKZD: Tensor,
    values_PKZD: Tensor,
    table_RP: Tensor,
    positions_R: Tensor,
    scaling: float,
    sliding_window: int,
    softcap: float,
    prologue: Prologue | None = None,
    *,
    shape: Shape | None = None,
) -> Tensor:
    """`tunesmith.engine.cuda.custom_ops.paged_decode`, with what is done to the heads before."""
    _, num_heads, num_requests, size = query_1HRD.shape
    num_kv_heads, page_size = keys_PKZD.shape[1], keys_PKZD.shape[2]
    num_groups, size_pad = num_heads // num_kv_heads, max(16, triton.next_power_of_2(size))
    num_splits = choose_num_splits(num_requests, num_kv_heads, count_processors())
    if shape is None:
        shape = choose_shape(size_pad, query_1HRD.dtype, page_size, num_requests * num_kv_heads * num_splits)
    output = torch.empty((1, num_requests, num_heads, size), dtype=query_1HRD.dtype, device=query_1HRD.device)
    parts, maxima, sums = output, output, output
    if num_splits > 1:
        part_shape = (num_requests, num_kv_heads, num_splits, num_groups)
        parts = torch.empty((*part_shape, size), dtype=torch.float32, device=query_1HRD.device)
        maxima, sums = parts.new_empty(part_shape), parts.new_empty(part_shape)
    cos, sin, query_norm, key_norm = get_prologue_tensors(prologue, query_1HRD)
    options = get_launch_options()
    _attend_context[(num_requests, num_kv_heads, num_splits)](
        query_1HRD, key_1KRD, value_1KRD, keys_PKZD, values_PKZD, table_RP, positions_R, cos, sin,
        query_norm, key_norm, parts, maxima, sums,
        scaling, softcap, prologue.epsilon if prologue else 0.0, sliding_window, table_RP.stride(0), num_splits,
        query_1HRD.stride(2), query_1HRD.stride(1), key_1KRD.stride(2), key_1KRD.stride(1),
        value_1KRD.stride(2), value_1KRD.stride(1), cos.stride(1),
        HEADS=num_kv_heads, GROUPS=num_groups, GROUPS_PAD=max(16, triton.next_power_of_2(num_groups)),
        SIZE=size, SIZE_PAD=size_pad, PAGE=page_size, TOKENS=shape.block,
        HAS_SOFTCAP=softcap > 0, HAS_WINDOW=sliding_window > 0, HAS_ROPE=prologue is not None,
        HAS_NORM=prologue is not None and prologue.query_norm_D is not None, IS_LARGE=keys_PKZD.numel() >= 2**31,
        PRECISION="ieee" if query_1HRD.dtype == torch.float32 else "tf32",
        num_warps=shape.num_warps, num_stages=shape.num_stages, maxnreg=shape.max_registers, **options,
    )  # fmt: skip
    if num_splits > 1:
        _reduce_splits[(num_requests * num_kv_heads, num_groups)](
            parts, maxima, sums, output, num_splits,
            GROUPS=num_groups, SIZE=size, SIZE_PAD=size_pad, MOST=MAX_SPLITS, **options,
        )  # fmt: skip
    return output


def choose_shape(size: int, dtype: torch.dtype, page_size: int, num_programs: int) -> Shape:
    """What was fastest on an H200: tiles of one page, which one warp reads; float32 is for comparisons."""
    if dtype == torch.float32:
        return Shape(16, 4, 2)
    if page_size % 16:
        return Shape(32, 4, 4)
    num_stages = 6 if num_programs < MANY_PROGRAMS else 4
    return Shape(16, 1, num_stages, max_registers=80 if size <= 64 else 128 if size <= 128 else None)


def choose_num_splits(num_requests: int, num_kv_heads: int, num_processors: int) -> int:
    """Enough programs to fill the device twice, a power of two."""
    num_splits = 1
    while num_splits < MAX_SPLITS and num_requests * num_kv_heads * num_splits < 2 * num_processors:
        num_splits *= 2
    return num_splits


@cache
def count_processors() -> int:
    """Multiprocessors of the device in use."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


torch.library.impl("tunesmith::paged_decode", "CUDA")(attend_decoding)
