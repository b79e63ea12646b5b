"""Pairs of token and expert on a GPU: sorted by expert in one launch, and multiplied with the weights of their experts.

Triton is installed on CUDA machines only, so import this file there only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from tunesmith.model.experts import sort_many_pairs

BLOCK, MAX_PAIRS = 2048, 16384
TILES = ((16, 32, 128, 4), (32, 64, 64, 8))
"""Most pairs of an expert on average, pairs and channels of a tile, and its warps
(`results/engine/rollout_cuda/grouped_products_tiles.txt`)."""
BLOCK_O = 128


@triton.jit
def _sort_kernel(experts, orders, places, ends, num_pairs, BLOCK: tl.constexpr):
    expert, first, count = tl.program_id(0), 0, 0
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        chosen = tl.load(experts + pair, mask=pair < num_pairs, other=2**30)
        first += tl.sum((chosen < expert).to(tl.int32), 0)
        count += tl.sum((chosen == expert).to(tl.int32), 0)
    tl.store(ends + expert, first + count)
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        is_mine = tl.load(experts + pair, mask=pair < num_pairs, other=2**30) == expert
        rank = tl.cumsum(is_mine.to(tl.int32), 0)
        place = first + rank - 1
        tl.store(orders + place, pair.to(orders.dtype.element_ty), mask=is_mine)
        tl.store(places + pair, place.to(places.dtype.element_ty), mask=is_mine)
        first += tl.max(rank, 0)


def sort_pairs(expert_P: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `model.experts.sort_pairs`. Each program reads all pairs, so for many a sort is faster."""
    if len(expert_P) > MAX_PAIRS:
        return sort_many_pairs(expert_P, num_experts)
    order_P, place_P = (torch.empty_like(expert_P, dtype=torch.int64) for _ in range(2))
    end_E = torch.empty(num_experts, dtype=torch.int32, device=expert_P.device)
    _sort_kernel[(num_experts,)](expert_P, order_P, place_P, end_E, len(expert_P), BLOCK, num_warps=8)
    return order_P, place_P, end_E


@triton.jit
def _multiply_kernel(
    inputs, weights, outputs, ends, num_experts, size_c, size_o, stride_e, stride_c, stride_o,
    NUM_EXPERTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    # tiles of one expert are adjacent programs, which find its weights in the cache
    tile, experts = tl.program_id(0), tl.arange(0, NUM_EXPERTS)
    end = tl.load(ends + experts, mask=experts < num_experts, other=0)
    start = tl.load(ends + experts - 1, mask=(experts > 0) & (experts < num_experts), other=0)
    num_tiles = (end - start + BLOCK_P - 1) // BLOCK_P
    last_tile = tl.cumsum(num_tiles, 0)
    expert = tl.sum(((last_tile <= tile) & (experts < num_experts)).to(tl.int32), 0)
    if expert == num_experts:
        return
    is_expert = experts == expert
    first_tile = tl.sum(tl.where(is_expert, last_tile - num_tiles, 0), 0)
    first, stop = tl.sum(tl.where(is_expert, start, 0), 0), tl.sum(tl.where(is_expert, end, 0), 0)
    pairs = first + (tile - first_tile) * BLOCK_P + tl.arange(0, BLOCK_P)
    columns, channels = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_C)
    input_places = inputs + pairs[:, None].to(tl.int64) * size_c + channels[None]
    weight_places = weights + expert.to(tl.int64) * stride_e + channels[:, None] * stride_c + columns[None] * stride_o
    is_pair, is_column = pairs[:, None] < stop, columns[None] < size_o
    total = tl.zeros((BLOCK_P, BLOCK_O), dtype=tl.float32)
    for _ in range(0, size_c, BLOCK_C):
        rows = tl.load(input_places, mask=is_pair, other=0.0)
        total = tl.dot(rows, tl.load(weight_places, mask=is_column, other=0.0), total)
        input_places += BLOCK_C
        weight_places += BLOCK_C * stride_c
    places = outputs + pairs[:, None].to(tl.int64) * size_o + columns[None]
    tl.store(places, total.to(outputs.dtype.element_ty), mask=is_pair & is_column)


def multiply_groups(input_PC: Tensor, weight_ECO: Tensor, end_E: Tensor) -> Tensor:
    """See `model.experts.multiply_groups`. With few pairs for an expert the time is that of reading its weights."""
    (num_pairs, size_c), (num_experts, _, size_o) = input_PC.shape, weight_ECO.shape
    tiles = [each for most, *each in TILES if num_pairs <= most * num_experts and size_c % each[1] == 0]
    if not tiles or input_PC.dtype.itemsize != 2:
        return functional.grouped_mm(input_PC, weight_ECO, offs=end_E)
    block_p, block_c, num_warps = tiles[0]
    output_PO = input_PC.new_empty((num_pairs, size_o))
    num_tiles = num_pairs // block_p + min(num_pairs, num_experts)  # at most, as all but one of an expert are full
    _multiply_kernel[(num_tiles, triton.cdiv(size_o, BLOCK_O))](
        input_PC.contiguous(), weight_ECO, output_PO, end_E, num_experts, size_c, size_o, *weight_ECO.stride(),
        triton.next_power_of_2(num_experts), block_p, block_c, BLOCK_O, num_warps=num_warps, num_stages=3,
    )  # fmt: skip
    return output_PO


for _function in (sort_pairs, multiply_groups):
    torch.library.impl(f"tunesmith::{_function.__name__}", "CUDA")(_function)
