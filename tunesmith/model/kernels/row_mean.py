"""Means over the last axis, one program a row: the same bits for any number of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024
"""Entries per loop iteration."""


@triton.jit(do_not_specialize=["num_columns", "stride"])
def _row_mean_kernel(x, means, num_columns, stride, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, num_columns, COLUMNS):
        is_used = start + columns < num_columns
        total += tl.load(x + row * stride + start + columns, mask=is_used, other=0.0).to(tl.float32)
    tl.store(means + row, (tl.sum(total, axis=0) / num_columns).to(means.dtype.element_ty))


def compute_row_means(x: Tensor) -> Tensor:
    """Means [...] of x [..., C], summed in float32."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    means = torch.empty(x.shape[:-1], dtype=x.dtype, device=x.device)
    if means.numel():
        _row_mean_kernel[(len(rows),)](rows, means, x.shape[-1], rows.stride(0), COLUMNS=TILE, num_warps=4)
    return means
