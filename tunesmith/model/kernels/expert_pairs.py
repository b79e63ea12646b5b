"""Pairs of token and expert, sorted by expert, on a GPU: one program for each expert, one launch.

Triton is installed on CUDA machines only, so import this file there only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tunesmith.model.experts import sort_many_pairs

BLOCK, MAX_PAIRS = 2048, 16384


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


torch.library.impl("tunesmith::sort_pairs", "CUDA")(sort_pairs)
