"""The row-wise parts of a transformer layer: RMS norm (Zhang and Sennrich, 2019), and SiLU of gates times values.

Axes: T tokens, C hidden size, I intermediate size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tunesmith.engine.cuda.kernels.launch import begin, get_launch_options

GATE_BLOCK = 1024


@triton.jit
def _norm_rows(
    inputs, weight, output, epsilon, size, input_stride, BLOCK: tl.constexpr, IS_CHAINED: tl.constexpr
):  # fmt: skip
    begin(IS_CHAINED)
    row, places = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_used = places < size
    x = tl.load(inputs + row * input_stride + places, mask=is_used, other=0.0).to(tl.float32)
    scale = tl.load(weight + places, mask=is_used, other=0.0)
    normed = (x * tl.rsqrt(tl.sum(x * x, axis=0) / size + epsilon)).to(inputs.dtype.element_ty)
    tl.store(output + row * size + places, (normed * scale).to(output.dtype.element_ty), mask=is_used)


@triton.jit
def _gate_rows(both, output, size, BLOCK: tl.constexpr, IS_CHAINED: tl.constexpr):
    begin(IS_CHAINED)
    row, places = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_used = places < size
    gate = tl.load(both + row * 2 * size + places, mask=is_used, other=0.0).to(tl.float32)
    value = tl.load(both + row * 2 * size + size + places, mask=is_used, other=0.0)
    opened = (gate * tl.sigmoid(gate)).to(output.dtype.element_ty)
    tl.store(output + row * size + places, (opened * value).to(output.dtype.element_ty), mask=is_used)


def norm_rows(inputs: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    """Each last axis over its root mean square, times the weight, in the weight's type.

    It is rounded where transformers' modules round: before the weight to the inputs' type, and at the end.
    """
    size = inputs.shape[-1]
    rows = inputs.reshape(-1, size)
    output = torch.empty(rows.shape, dtype=weight_C.dtype, device=rows.device)
    block = triton.next_power_of_2(size)
    _norm_rows[(len(rows),)](
        rows, weight_C, output, epsilon, size, rows.stride(0), BLOCK=block, num_warps=2 if block <= 1024 else 8,
        **get_launch_options(),
    )  # fmt: skip
    return output.view(inputs.shape)


def gate_rows(both_T2I: Tensor) -> Tensor:
    """SiLU of the first half of each last axis times the second half."""
    size = both_T2I.shape[-1] // 2
    rows = both_T2I.reshape(-1, 2 * size)
    output = torch.empty((*both_T2I.shape[:-1], size), dtype=both_T2I.dtype, device=both_T2I.device)
    _gate_rows[(len(rows), triton.cdiv(size, GATE_BLOCK))](
        rows, output, size, BLOCK=GATE_BLOCK, num_warps=4, **get_launch_options()
    )
    return output
