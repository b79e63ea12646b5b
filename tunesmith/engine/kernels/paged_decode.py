"""Attention of one new token a request over paged keys and values, written by the same kernel.

One program serves one request and one key-value head, with all its query heads: it writes the new key and value into
their page, then goes over the context in blocks with an online softmax (Milakov and Gimelshein, 2018). Where requests
are few, the context is split over several programs and a second kernel reduces their parts.

Axes: R requests, H query heads, K key-value heads, G query heads of one key-value head, D head size, Z page size,
S splits of the context.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
"""Context tokens of one step of the loop."""


@triton.jit
def _cap(scores, softcap, HAS_SOFTCAP: tl.constexpr):
    """softcap * tanh(scores / softcap)."""
    if HAS_SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    return scores


@triton.jit
def _attend_context(
    query, key, value, keys, values, table, positions, output, maxima, sums,
    scaling, softcap, window, table_width, num_splits,
    query_stride_r, query_stride_h, key_stride_r, key_stride_h, value_stride_r, value_stride_h,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
    PAGE: tl.constexpr, TOKENS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups, sizes, tokens = tl.arange(0, GROUPS_PAD), tl.arange(0, SIZE_PAD), tl.arange(0, TOKENS)
    is_group, is_size = groups < GROUPS, sizes < SIZE
    position = tl.load(positions + request)
    is_query = is_group[:, None] & is_size[None, :]
    places_GD = (head * GROUPS + groups)[:, None] * query_stride_h + sizes[None, :]
    query_GD = tl.load(query + request * query_stride_r + places_GD, mask=is_query, other=0.0)
    new_key = tl.load(key + request * key_stride_r + head * key_stride_h + sizes, mask=is_size, other=0.0)
    new_value = tl.load(value + request * value_stride_r + head * value_stride_h + sizes, mask=is_size, other=0.0)
    maximum, total = tl.full((GROUPS_PAD,), -1e30, tl.float32), tl.zeros((GROUPS_PAD,), tl.float32)
    mixed_GD = tl.zeros((GROUPS_PAD, SIZE_PAD), tl.float32)
    if split == 0:
        page = tl.load(table + request * table_width + position // PAGE).to(tl.int64)
        place = (page * HEADS + head) * PAGE * SIZE + (position % PAGE) * SIZE
        tl.store(keys + place + sizes, new_key, mask=is_size)
        tl.store(values + place + sizes, new_value, mask=is_size)
        maximum = tl.sum(query_GD.to(tl.float32) * new_key.to(tl.float32)[None, :], axis=1) * scaling
        maximum = _cap(maximum, softcap, HAS_SOFTCAP)
        total += 1.0
        mixed_GD += new_value.to(tl.float32)[None, :]
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0)
    num_blocks = tl.cdiv(position - first, TOKENS)
    per_split = tl.cdiv(num_blocks, num_splits)
    begin = first + split * per_split * TOKENS
    end = tl.minimum(begin + per_split * TOKENS, position)
    for start in range(begin, end, TOKENS):
        places = start + tokens
        is_token = places < end
        pages = tl.load(table + request * table_width + places // PAGE, mask=is_token, other=0).to(tl.int64)
        base = (pages * HEADS + head) * PAGE * SIZE + (places % PAGE) * SIZE
        is_used = is_token[:, None] & is_size[None, :]
        keys_TD = tl.load(keys + base[:, None] + sizes[None, :], mask=is_used, other=0.0)
        scores = tl.dot(query_GD, tl.trans(keys_TD), input_precision=PRECISION) * scaling
        scores = _cap(scores, softcap, HAS_SOFTCAP)
        scores = tl.where(is_token[None, :], scores, -1e30)
        higher = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(maximum - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        values_TD = tl.load(values + base[:, None] + sizes[None, :], mask=is_used, other=0.0)
        mixed_GD = tl.dot(weights.to(values_TD.dtype), values_TD, mixed_GD * shrink[:, None], input_precision=PRECISION)
        maximum = higher
    row = (request * HEADS + head) * num_splits + split
    if num_splits == 1:
        mixed_GD = mixed_GD / total[:, None]
    else:
        tl.store(maxima + row * GROUPS + groups, maximum, mask=is_group)
        tl.store(sums + row * GROUPS + groups, total, mask=is_group)
    places_GD = (row * GROUPS + groups)[:, None] * SIZE + sizes[None, :]
    tl.store(output + places_GD, mixed_GD.to(output.dtype.element_ty), mask=is_query)


@triton.jit
def _reduce_splits(
    parts, maxima, sums, output,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0), tl.program_id(1)
    splits, sizes = tl.arange(0, SPLITS), tl.arange(0, SIZE_PAD)
    is_size = sizes < SIZE
    heads = (row * SPLITS + splits) * GROUPS + group
    maximum = tl.load(maxima + heads)
    scale = tl.exp(maximum - tl.max(maximum, axis=0))
    total = tl.sum(tl.load(sums + heads) * scale, axis=0)
    parts_SD = tl.load(parts + heads[:, None] * SIZE + sizes[None, :], mask=is_size[None, :], other=0.0)
    mixed = tl.sum(parts_SD * scale[:, None], axis=0) / total
    tl.store(output + (row * GROUPS + group) * SIZE + sizes, mixed.to(output.dtype.element_ty), mask=is_size)


@torch.library.custom_op("tunesmith::paged_decode", mutates_args=("keys_PKZD", "values_PKZD"))
def paged_decode(
    query_RHD: Tensor,
    key_RKD: Tensor,
    value_RKD: Tensor,
    keys_PKZD: Tensor,
    values_PKZD: Tensor,
    table_RP: Tensor,
    positions_R: Tensor,
    scaling: float,
    sliding_window: int,
    softcap: float,
    num_splits: int,
) -> Tensor:
    """Write each request's new key and value at its position and attend over all up to it; returns [R, H, D].

    The last axis of query, key and value has stride 1. `sliding_window` and `softcap` 0 mean none; `num_splits` is a
    power of two.
    """
    num_requests, num_heads, size = query_RHD.shape
    num_kv_heads, page_size = keys_PKZD.shape[1], keys_PKZD.shape[2]
    num_groups, size_pad = num_heads // num_kv_heads, max(16, triton.next_power_of_2(size))
    output = torch.empty((num_requests, num_heads, size), dtype=query_RHD.dtype, device=query_RHD.device)
    parts, maxima, sums = output, output, output
    if num_splits > 1:
        shape = (num_requests, num_kv_heads, num_splits, num_groups)
        parts = torch.empty((*shape, size), dtype=torch.float32, device=query_RHD.device)
        maxima, sums = parts.new_empty(shape), parts.new_empty(shape)
    _attend_context[(num_requests, num_kv_heads, num_splits)](
        query_RHD, key_RKD, value_RKD, keys_PKZD, values_PKZD, table_RP, positions_R, parts, maxima, sums,
        scaling, softcap, sliding_window, table_RP.shape[1], num_splits,
        query_RHD.stride(0), query_RHD.stride(1), key_RKD.stride(0), key_RKD.stride(1),
        value_RKD.stride(0), value_RKD.stride(1),
        HEADS=num_kv_heads, GROUPS=num_groups, GROUPS_PAD=max(16, triton.next_power_of_2(num_groups)),
        SIZE=size, SIZE_PAD=size_pad, PAGE=page_size, TOKENS=BLOCK,
        HAS_SOFTCAP=softcap > 0, HAS_WINDOW=sliding_window > 0,
        PRECISION="ieee" if query_RHD.dtype == torch.float32 else "tf32", num_warps=4, num_stages=3,
    )  # fmt: skip
    if num_splits > 1:
        _reduce_splits[(num_requests * num_kv_heads, num_groups)](
            parts, maxima, sums, output, GROUPS=num_groups, SIZE=size, SIZE_PAD=size_pad, SPLITS=num_splits
        )
    return output


@paged_decode.register_fake
def _(query_RHD: Tensor, *_: object) -> Tensor:
    return torch.empty(query_RHD.shape, dtype=query_RHD.dtype, device=query_RHD.device)


def choose_num_splits(num_requests: int, num_kv_heads: int, num_processors: int) -> int:
    """Enough programs to fill the device twice, a power of two up to 16."""
    num_splits = 1
    while num_splits < 16 and num_requests * num_kv_heads * num_splits < 2 * num_processors:
        num_splits *= 2
    return num_splits
