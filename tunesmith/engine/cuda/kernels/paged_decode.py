"""Paged decode attention: one new token per request; the same kernel writes its key and value to the cache.

One program handles one range of tokens of a context and one key-value head with all its query heads. Short contexts
are one range each. A batch with long ones is divided into items of similar length, so that the programs of a launch
finish together whatever the lengths are; a second kernel merges the partial results of the items of a request, in their
order. Requests that share a prefix are one item there with their queries stacked, so the prefix is read once.
`list_items` lists the items on the device at each step, for all layers, since contexts grow with every replay of a
captured graph.

The program that holds a request's new token writes that token's key and value to their KV-cache block and starts its
online softmax (Milakov and Gimelshein, 2018) with them. RMS norm and rotary embedding of query and key heads can be
fused into the same kernel.

Axes: R requests, H query heads, K key-value heads, G query heads of one key-value head, D head size, P KV-cache blocks,
Z block size, M stacked queries of an item, T tokens of a tile, S partial results, W items, F fields of an item.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tunesmith.engine.cuda.decode_work import ALIGNMENT, ITEM_FIELDS, MANY_PROGRAMS, DecodeWork, get_num_sms
from tunesmith.model.kernels.heads import apply_softcap, load_heads
from tunesmith.model.kernels.launch import get_launch_options, pdl_wait
from tunesmith.model.kernels.prologue import Prologue, get_prologue_tensors


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
def _divide_up(value, divisor):
    return (value + divisor - 1) // divisor


@triton.jit
def _store_items(
    entries, start, stop, index, count, num_members, flags, ALIGNMENT: tl.constexpr, FIELDS: tl.constexpr
):  # fmt: skip
    """Cut the tokens from `start` to `stop` into `count` items; the requests have `index` items before the first."""
    aligned = start // ALIGNMENT * ALIGNMENT
    length = _divide_up(_divide_up(stop - aligned, count), ALIGNMENT) * ALIGNMENT
    for first in range(0, count, 32):
        numbers = first + tl.arange(0, 32)
        is_item = numbers < count
        items = entries + numbers * FIELDS
        tl.store(items, tl.maximum(aligned + numbers * length, start), mask=is_item)
        tl.store(items + 1, tl.minimum(aligned + (numbers + 1) * length, stop), mask=is_item)
        tl.store(items + 2, num_members + 0 * numbers, mask=is_item)
        tl.store(items + 3, index + numbers, mask=is_item)
        tl.store(items + 4, tl.where(numbers == 0, flags, 0), mask=is_item)


@triton.jit
def _store_member(entries, count, member, row, base, MEMBERS: tl.constexpr, FIELDS: tl.constexpr):
    """Write the row of one request of each of `count` items, and the first of its partial results."""
    for first in range(0, count, 32):
        numbers = first + tl.arange(0, 32)
        items = entries + numbers * FIELDS + FIELDS - 2 * MEMBERS + member
        tl.store(items, row + 0 * numbers, mask=numbers < count)
        tl.store(items + MEMBERS, base + 0 * numbers, mask=numbers < count)


@triton.jit(do_not_specialize=["num_rows", "num_prefixes", "window"])
def _list_items_kernel(
    positions, division, items, parts, num_rows, num_prefixes, window, division_stride, items_stride,
    ROWS: tl.constexpr, PREFIXES: tl.constexpr, MEMBERS: tl.constexpr, FIELDS: tl.constexpr, ALIGNMENT: tl.constexpr,
    HAS_PDL: tl.constexpr,
):  # fmt: skip
    """The items of one request or of one shared prefix; each program computes the sums before its own entries."""
    pdl_wait(HAS_PDL)
    program, is_windowed = tl.program_id(0), tl.program_id(1)
    items, parts = items + is_windowed * items_stride, parts + is_windowed * 2 * num_rows
    ranks, prefix_ids = tl.arange(0, ROWS), tl.arange(0, PREFIXES)
    order = tl.load(division + ranks, mask=ranks < num_rows, other=0)
    starts = tl.load(division + division_stride + ranks, mask=ranks < num_rows, other=0)
    stops = tl.load(positions + order, mask=ranks < num_rows, other=0).to(tl.int32)
    # requests that share a prefix have windows of their own, so the prefix is not shared under a sliding window
    is_prefix = (prefix_ids < num_prefixes) & (is_windowed == 0)
    fields = division + 2 * division_stride + prefix_ids
    firsts = tl.load(fields, mask=is_prefix, other=0)
    sizes = tl.load(fields + division_stride, mask=is_prefix, other=0)
    prefix_starts = tl.load(fields + 2 * division_stride, mask=is_prefix, other=0)
    prefix_stops = tl.load(fields + 3 * division_stride, mask=is_prefix, other=0)
    chunk = tl.load(division + 6 * division_stride)
    if is_windowed == 1:
        starts = tl.maximum(stops - window + 1, 0)
    own_counts = tl.maximum(_divide_up(stops - starts // ALIGNMENT * ALIGNMENT, chunk), 1)
    own_counts = tl.where(ranks < num_rows, own_counts, 0)
    counts = _divide_up(prefix_stops - prefix_starts // ALIGNMENT * ALIGNMENT, chunk)
    num_shared = tl.sum(counts, axis=0)
    if program == 0:
        tl.store(items, num_shared + tl.sum(own_counts, axis=0))
    items += FIELDS
    if program < num_rows:
        row, own_count = tl.sum(tl.where(ranks == program, order, 0)), tl.sum(tl.where(ranks == program, own_counts, 0))
        start, stop = tl.sum(tl.where(ranks == program, starts, 0)), tl.sum(tl.where(ranks == program, stops, 0))
        before = tl.sum(tl.where(ranks < program, own_counts, 0))
        index = tl.sum(tl.where((firsts <= program) & (program < firsts + sizes), counts, 0))
        base = before + tl.sum(counts * tl.minimum(tl.maximum(program - firsts, 0), sizes))
        count = index + own_count
        tl.store(parts + 2 * row, base)
        tl.store(parts + 2 * row + 1, count)
        entries = items + (num_shared + before) * FIELDS
        flags = tl.where(count == 1, 3, 1)
        _store_items(entries, start, stop, index, own_count, 1, flags, ALIGNMENT, FIELDS)
        _store_member(entries, own_count, 0, row, base, MEMBERS, FIELDS)
    elif is_windowed == 0:
        prefix = program - num_rows
        first, size = (
            tl.sum(tl.where(prefix_ids == prefix, firsts, 0)),
            tl.sum(tl.where(prefix_ids == prefix, sizes, 0)),
        )
        start = tl.sum(tl.where(prefix_ids == prefix, prefix_starts, 0))
        stop = tl.sum(tl.where(prefix_ids == prefix, prefix_stops, 0))
        count = tl.sum(tl.where(prefix_ids == prefix, counts, 0))
        entries = items + tl.sum(tl.where(prefix_ids < prefix, counts, 0)) * FIELDS
        if size > 0:
            is_outer = (firsts <= first) & (first < firsts + sizes) & (prefix_starts < start)
            index = tl.sum(tl.where(is_outer, counts, 0))
            _store_items(entries, start, stop, index, count, size, 0, ALIGNMENT, FIELDS)
            for member in range(size):
                rank = first + member
                base = tl.sum(tl.where(ranks < rank, own_counts, 0))
                base += tl.sum(counts * tl.minimum(tl.maximum(rank - firsts, 0), sizes))
                row = tl.sum(tl.where(ranks == rank, order, 0))
                _store_member(entries, count, member, row, base, MEMBERS, FIELDS)


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
    query_MD, maximum, total, acc_MD, keys, values, block_table, head, first, end, scaling, softcap,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, IS_LARGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Continue an online softmax over the tokens from `first` to `end`: maximum and sum [M], weighted values [M, D]."""
    for start in range(first // TOKENS * TOKENS, end, TOKENS):
        offsets = start + tl.arange(0, TOKENS)
        is_token = (offsets >= first) & (offsets < end)
        keys_TD, values_TD = _load_tile(
            keys, values, block_table, head, start, is_token, HEADS, SIZE, SIZE_PAD, BLOCK_SIZE, TOKENS, IS_LARGE
        )
        scores = tl.dot(query_MD, tl.trans(keys_TD), input_precision=PRECISION) * scaling
        scores = apply_softcap(scores, softcap, HAS_SOFTCAP)
        # finite, since -inf minus -inf would be NaN
        scores = tl.where(is_token[None, :], scores, -1e30)
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_maximum[:, None])
        rescale = tl.exp(maximum - new_maximum)
        total = total * rescale + tl.sum(weights, axis=1)
        acc_MD = tl.dot(weights.to(values_TD.dtype), values_TD, acc_MD * rescale[:, None], input_precision=PRECISION)
        maximum = new_maximum
    return maximum, total, acc_MD


@triton.jit
def _paged_decode_kernel(
    query, key, value, keys, values, block_table, positions, items, cos, sin, query_norm, key_norm,
    output, parts, maxima, sums, sinks, scaling, softcap, epsilon, window, table_width,
    query_stride_r, query_stride_h, key_stride_r, key_stride_h, value_stride_r, value_stride_h, cos_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, QUERIES: tl.constexpr, MEMBERS: tl.constexpr, FIELDS: tl.constexpr,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
    HAS_ITEMS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr, HAS_SINKS: tl.constexpr, IS_LARGE: tl.constexpr, PRECISION: tl.constexpr,
    HAS_PDL: tl.constexpr,
):  # fmt: skip
    if HAS_ITEMS:  # those of one range are adjacent, so that programs that run together read adjacent heads of a block
        head, item = tl.program_id(0), tl.program_id(1)
    else:
        item, head = tl.program_id(0), tl.program_id(1)
    queries, sizes = tl.arange(0, QUERIES), tl.arange(0, SIZE_PAD)
    member, group, is_size, one = queries // GROUPS, queries % GROUPS, sizes < SIZE, tl.zeros((1,), tl.int32)
    # the previous kernel, which may still run, writes neither items nor positions
    if HAS_ITEMS:
        entry = items + (item + 1) * FIELDS
        members = entry + FIELDS - 2 * MEMBERS
        num_items, start, stop, row = tl.load(items), tl.load(entry), tl.load(entry + 1), tl.load(members)
        num_members, index, flags = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
        if item >= num_items:
            return
        is_query, rows, bases = queries < GROUPS, row + 0 * queries, tl.load(members + MEMBERS) + 0 * queries
        if MEMBERS > 1:
            # loaded without waiting for `num_members`: what is not used is the row of an earlier item
            is_query, is_member = member < num_members, member < MEMBERS
            rows = tl.load(members + member, mask=is_member, other=0)
            bases = tl.load(members + MEMBERS + member, mask=is_member, other=0)
        has_new_token, is_whole = flags % 2 == 1, flags >= 2
    else:
        row, start, stop = item, 0, tl.load(positions + item).to(tl.int32)
        if HAS_WINDOW:
            start = tl.maximum(stop - window + 1, 0)
        is_query, rows = queries < GROUPS, row + 0 * queries
        has_new_token, is_whole = True, True
    pdl_wait(HAS_PDL)
    query_heads = query + rows * query_stride_r + (head * GROUPS + group) * query_stride_h
    query_MD = load_heads(
        query_heads, cos + rows * cos_stride, sin + rows * cos_stride, query_norm, epsilon, is_query,
        SIZE, SIZE_PAD, HAS_NORM, HAS_ROPE,
    )  # fmt: skip
    maximum, total = tl.full((QUERIES,), -1e30, tl.float32), tl.zeros((QUERIES,), tl.float32)
    acc_MD = tl.zeros((QUERIES, SIZE_PAD), tl.float32)
    block_table += row * table_width
    # The new token comes from registers: it is not read back from the cache, where the store may not be visible yet.
    if has_new_token:
        position, cos, sin = tl.load(positions + row), cos + row * cos_stride, sin + row * cos_stride
        key_1D = load_heads(
            key + row * key_stride_r + head * key_stride_h + one, cos + one, sin + one, key_norm, epsilon, one == 0,
            SIZE, SIZE_PAD, HAS_NORM, HAS_ROPE,
        )  # fmt: skip
        new_key = tl.sum(key_1D.to(tl.float32), axis=0)
        new_value = tl.load(value + row * value_stride_r + head * value_stride_h + sizes, mask=is_size, other=0.0)
        block = tl.load(block_table + position // BLOCK_SIZE).to(tl.int64)
        offset = (block * HEADS + head) * (BLOCK_SIZE * SIZE) + (position % BLOCK_SIZE) * SIZE
        tl.store(keys + offset + sizes, new_key.to(keys.dtype.element_ty), mask=is_size)
        tl.store(values + offset + sizes, new_value, mask=is_size)
        score = tl.sum(query_MD.to(tl.float32) * new_key[None, :], axis=1) * scaling
        maximum = apply_softcap(score, softcap, HAS_SOFTCAP)
        total += 1.0
        acc_MD += new_value.to(tl.float32)[None, :]
    maximum, total, acc_MD = _accumulate_context(
        query_MD, maximum, total, acc_MD, keys, values, block_table, head, start, stop,
        scaling, softcap, HEADS, SIZE, SIZE_PAD, BLOCK_SIZE, TOKENS, HAS_SOFTCAP, IS_LARGE, PRECISION,
    )  # fmt: skip
    is_output = is_query[:, None] & is_size[None, :]
    if is_whole:
        heads = (row * HEADS + head) * GROUPS + group
        if HAS_SINKS:
            sink = tl.load(sinks + head * GROUPS + group, mask=is_query, other=0.0).to(tl.float32)
            total += tl.exp(sink - maximum)
        acc_MD = acc_MD / total[:, None]
        tl.store(output + heads[:, None] * SIZE + sizes[None, :], acc_MD.to(output.dtype.element_ty), mask=is_output)
    elif HAS_ITEMS:
        heads = ((bases + index) * HEADS + head) * GROUPS + group
        tl.store(maxima + heads, maximum, mask=is_query)
        tl.store(sums + heads, total, mask=is_query)
        tl.store(parts + heads[:, None] * SIZE + sizes[None, :], acc_MD, mask=is_output)


@triton.jit
def _merge_parts_kernel(
    part_ranges, parts, maxima, sums, sinks, output,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, PARTS: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_PDL: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one request and query head."""
    head, row, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    base, count = tl.load(part_ranges + 2 * row), tl.load(part_ranges + 2 * row + 1)
    pdl_wait(HAS_PDL)
    if count == 1:
        return
    sizes = tl.arange(0, SIZE_PAD)
    maximum, total, acc = -1e30, 0.0, tl.zeros((SIZE_PAD,), tl.float32)
    for first in range(0, count, PARTS):
        numbers = first + tl.arange(0, PARTS)
        is_part = numbers < count
        heads = (base + numbers) * num_heads + head
        maxima_S = tl.load(maxima + heads, mask=is_part, other=-1e30)
        sums_S = tl.load(sums + heads, mask=is_part, other=0.0)
        is_used = is_part[:, None] & (sizes < SIZE)[None, :]
        parts_SD = tl.load(parts + heads[:, None] * SIZE + sizes[None, :], mask=is_used, other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(maxima_S, axis=0))
        scale, rescale = tl.exp(maxima_S - new_maximum), tl.exp(maximum - new_maximum)
        total = total * rescale + tl.sum(sums_S * scale, axis=0)
        acc = acc * rescale + tl.sum(parts_SD * scale[:, None], axis=0)
        maximum = new_maximum
    if HAS_SINKS:
        total += tl.exp(tl.load(sinks + head).to(tl.float32) - maximum)
    offsets = (row * num_heads + head) * SIZE + sizes
    tl.store(output + offsets, (acc / total).to(output.dtype.element_ty), mask=sizes < SIZE)


def list_items(work: DecodeWork) -> None:
    """List the step's items from the positions and the division of the batch, as they are on the device."""
    if not len(work.items_2WF):
        return
    num_rows, num_prefixes = len(work.positions_R), work.num_prefixes
    _list_items_kernel[(num_rows + num_prefixes, len(work.items_2WF))](
        work.positions_R, work.division_7S, work.items_2WF, work.parts_2R2, num_rows, num_prefixes, work.window,
        work.division_7S.stride(0), work.items_2WF.stride(0),
        ROWS=triton.next_power_of_2(num_rows), PREFIXES=triton.next_power_of_2(max(num_prefixes, 1)),
        MEMBERS=work.num_members, FIELDS=work.items_2WF.shape[2], ALIGNMENT=ALIGNMENT, **get_launch_options(),
    )  # fmt: skip


def run_paged_decode(
    query_1HRD: Tensor,
    key_1KRD: Tensor,
    value_1KRD: Tensor,
    keys_PKZD: Tensor,
    values_PKZD: Tensor,
    block_table_RP: Tensor,
    positions_R: Tensor,
    items_2WF: Tensor,
    parts_2R2: Tensor,
    scaling: float,
    sliding_window: int,
    softcap: float,
    sinks_H: Tensor | None = None,
    prologue: Prologue | None = None,
) -> Tensor:
    """Implement `tunesmith.engine.cuda.custom_ops.paged_decode`, with an optional fused prologue on the heads."""
    _, num_heads, num_requests, size = query_1HRD.shape
    num_kv_heads, block_size = keys_PKZD.shape[1], keys_PKZD.shape[2]
    num_groups, size_pad = num_heads // num_kv_heads, max(16, triton.next_power_of_2(size))
    has_items, num_fields, num_members, grid = bool(len(items_2WF)), 0, 1, (num_requests, num_kv_heads)
    output = torch.empty((1, num_requests, num_heads, size), dtype=query_1HRD.dtype, device=query_1HRD.device)
    items_WF, parts, maxima, sums = items_2WF, output, output, output
    if has_items:
        items_WF = items_2WF[int(sliding_window > 0)]
        num_items, num_fields = len(items_WF) - 1, items_WF.shape[1]
        num_members, grid = (num_fields - ITEM_FIELDS) // 2, (num_kv_heads, num_items)
        parts = query_1HRD.new_empty((num_items * num_members, num_heads, size), dtype=torch.float32)
        maxima, sums = parts.new_empty(parts.shape[:2]), parts.new_empty(parts.shape[:2])
    num_queries = max(16, triton.next_power_of_2(num_members * num_groups))
    per_sm = num_requests * num_kv_heads / get_num_sms(query_1HRD.device)
    config = choose_kernel_config(size_pad, query_1HRD.dtype, has_items=has_items, programs_per_sm=per_sm)
    cos, sin, query_norm, key_norm = get_prologue_tensors(prologue, query_1HRD)
    sinks = output if sinks_H is None else sinks_H
    options: dict[str, Any] = {"HAS_SINKS": sinks_H is not None, **get_launch_options()}
    _paged_decode_kernel[grid](
        query_1HRD, key_1KRD, value_1KRD, keys_PKZD, values_PKZD, block_table_RP, positions_R, items_WF,
        cos, sin, query_norm, key_norm, output, parts, maxima, sums, sinks,
        scaling, softcap, prologue.epsilon if prologue else 0.0, sliding_window, block_table_RP.stride(0),
        query_1HRD.stride(2), query_1HRD.stride(1), key_1KRD.stride(2), key_1KRD.stride(1),
        value_1KRD.stride(2), value_1KRD.stride(1), cos.stride(1),
        HEADS=num_kv_heads, GROUPS=num_groups, QUERIES=num_queries, MEMBERS=num_members, FIELDS=num_fields,
        SIZE=size, SIZE_PAD=size_pad, BLOCK_SIZE=block_size, TOKENS=config.tile,
        HAS_ITEMS=has_items, HAS_WINDOW=sliding_window > 0, HAS_SOFTCAP=softcap > 0, HAS_ROPE=prologue is not None,
        HAS_NORM=prologue is not None and prologue.query_norm_D is not None, IS_LARGE=keys_PKZD.numel() >= 2**31,
        PRECISION="ieee" if query_1HRD.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.max_registers, **options,
    )  # fmt: skip
    if has_items:
        _merge_parts_kernel[(num_heads, num_requests)](
            parts_2R2[int(sliding_window > 0)], parts, maxima, sums, sinks, output,
            SIZE=size, SIZE_PAD=size_pad, PARTS=1024 // size_pad, num_warps=1, **options,
        )  # fmt: skip
    return output


def choose_kernel_config(size: int, dtype: torch.dtype, *, has_items: bool, programs_per_sm: float) -> KernelConfig:
    """Fastest on an H200; float32 only serves comparisons.

    Where many programs run on a multiprocessor, they hide each other's latency, and one warp with few tiles in flight
    suffices. Where few run, each needs larger tiles or more of them in flight.
    """
    if dtype == torch.float32 or size > 256:
        return KernelConfig(16, 4, 2)
    max_registers = 128 if 64 < size <= 128 else None
    if has_items:
        return KernelConfig(16, 1, 4 if size > 128 else 6, max_registers)
    if programs_per_sm < 2 and size <= 128:
        return KernelConfig(128, 4, 3)
    if programs_per_sm < MANY_PROGRAMS:
        return KernelConfig(16, 1, 6, max_registers)
    return KernelConfig(32 if size <= 64 else 16, 1, 4, max_registers=128 if size <= 128 else None)


torch.library.impl("tunesmith::paged_decode", "CUDA")(run_paged_decode)
