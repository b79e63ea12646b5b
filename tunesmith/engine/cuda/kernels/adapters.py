"""LoRA adapters of the layers of one input, applied by two kernels while few tokens are decoded.

cuBLAS splits a product with so few outputs along its inputs and adds the parts in a second kernel, and takes one more
product for each adapted layer. Here the first kernel leaves the parts to the second, which adds them and applies the
second factors of all layers.

Axes: C inputs, R rank, V outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tunesmith.model.kernels.launch import get_launch_options, pdl_wait
from tunesmith.model.kernels.layer_ops import add_linear, merged_linear
from tunesmith.model.merged_weights import get_merged_view

MAX_ROWS = 1024
"""With more, the products occupy the device by themselves."""
MAX_LAYERS, MAX_OUTPUTS = 3, 256
"""Layers that the second kernel tells apart, and outputs of the first factors that fit into registers."""
MAX_INPUTS, MAX_UP_ELEMENTS = 8192, 2**20
"""With more, products were as fast or faster (`benchmarks/engine/adapter_kernels.py`)."""
ROWS = 16
MAX_SPLITS = 16


@triton.jit
def _shrink_kernel(
    inputs, downs, parts, num_rows, size, input_stride, num_outputs,
    ROWS: tl.constexpr, TILE: tl.constexpr, OUTPUTS: tl.constexpr, HAS_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(HAS_PDL)
    rows, outputs = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, OUTPUTS)
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(split * TILE, size, num_splits * TILE):
        columns = start + tl.arange(0, TILE)
        is_used = columns < size
        x = tl.load(
            inputs + rows.to(tl.int64)[:, None] * input_stride + columns[None, :],
            mask=is_row[:, None] & is_used[None, :], other=0.0,
        )  # fmt: skip
        down = tl.load(
            downs + outputs[None, :] * size + columns[:, None], mask=is_output[None, :] & is_used[:, None], other=0.0
        )
        total = tl.dot(x, down, total)
    places = (split * num_rows + rows)[:, None] * num_outputs + outputs[None, :]
    tl.store(parts + places, total, mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _expand_kernel(
    parts, ups, totals, factor, num_rows, num_splits, num_outputs, total_stride, end_0, end_1,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, HAS_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(HAS_PDL)
    first = tl.program_id(1) * TILE
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), first + tl.arange(0, TILE)
    ranks = tl.arange(0, RANK_PAD)
    is_row, is_rank = (rows < num_rows)[:, None], ranks < RANK
    layer = (first >= end_0).to(tl.int32) + (first >= end_1).to(tl.int32)
    places = totals + rows.to(tl.int64)[:, None] * total_stride + columns[None, :]
    total = tl.load(places, mask=is_row, other=0.0).to(tl.float32)
    up = tl.load(ups + columns[None, :] * RANK + ranks[:, None], mask=is_rank[:, None], other=0.0)
    down = tl.zeros((ROWS, RANK_PAD), tl.float32)
    for split in range(num_splits):
        part = parts + (split * num_rows + rows)[:, None] * num_outputs + layer * RANK + ranks[None, :]
        down += tl.load(part, mask=is_row & is_rank[None, :], other=0.0)
    total += factor * tl.dot(down.to(up.dtype), up)
    tl.store(places, total.to(totals.dtype.element_ty), mask=is_row)


def add_adapters(
    totals: Sequence[Tensor], inputs: Tensor, downs: Sequence[Tensor], ups: Sequence[Tensor], factors: Sequence[float]
) -> Sequence[Tensor]:
    """total += factor * (inputs @ down.T) @ up.T, in place, for each layer of the inputs [..., C].

    Takes totals [..., V], factors `downs` [R, C] and `ups` [V, R] and their scaling. The first product is rounded to
    the dtype of the factors, the second is not before it is added, as by two products of cuBLAS.
    """
    rows, rank, sizes = inputs.reshape(-1, inputs.shape[-1]), ups[0].shape[1], [len(up) for up in ups]
    down, up = get_merged_view(downs), get_merged_view(ups)
    columns = get_merged_view([total.view(-1, total.shape[-1]).t() for total in totals])
    up_tile = 128 if all(size % 128 == 0 for size in sizes) else 64
    is_small = len(rows) <= MAX_ROWS and len(sizes) <= MAX_LAYERS and len(sizes) * rank <= MAX_OUTPUTS
    is_small &= rows.shape[1] <= MAX_INPUTS and sum(sizes) * rank <= MAX_UP_ELEMENTS
    has_kernels = inputs.element_size() == 2 and len(set(factors)) == 1 and all(size % up_tile == 0 for size in sizes)
    if down is None or up is None or columns is None or not is_small or not has_kernels:
        return add_products(totals, inputs, downs, ups, factors)
    tile = 128 if len(down) <= 128 else 64
    num_tiles, num_splits = triton.cdiv(len(rows), ROWS), min(triton.cdiv(rows.shape[1], 512), MAX_SPLITS)
    parts = torch.empty((num_splits, len(rows), len(down)), dtype=torch.float32, device=rows.device)
    _shrink_kernel[(num_tiles, num_splits)](
        rows, down, parts, len(rows), rows.shape[1], rows.stride(0), len(down), ROWS=ROWS, TILE=tile,
        OUTPUTS=max(triton.next_power_of_2(len(down)), 16), num_warps=4, num_stages=3, **get_launch_options(),
    )  # fmt: skip
    _expand_kernel[(num_tiles, len(up) // up_tile)](
        parts, up, columns, factors[0], len(rows), num_splits, len(down), columns.stride(1), sizes[0], sum(sizes[:2]),
        RANK=rank, RANK_PAD=max(triton.next_power_of_2(rank), 16), ROWS=ROWS, TILE=up_tile, num_warps=4,
        **get_launch_options(),
    )  # fmt: skip
    return totals


def add_products(
    totals: Sequence[Tensor], inputs: Tensor, downs: Sequence[Tensor], ups: Sequence[Tensor], factors: Sequence[float]
) -> Sequence[Tensor]:
    """`add_adapters` by products of cuBLAS, for any sizes."""
    products = merged_linear(inputs, downs, [None] * len(downs))
    return [add_linear(*each) for each in zip(totals, products, ups, factors, strict=True)]
