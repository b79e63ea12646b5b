"""Operations of a fused transformer layer: RMS norm (Zhang and Sennrich, 2019), SiLU(gate) * value, matrix products.

Axes: T tokens, C hidden size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from tunesmith.model.kernels.launch import get_launch_options, pdl_wait
from tunesmith.model.merged_weights import find_merged_groups

GATE_TILE = 1024


@triton.jit
def _rms_norm_kernel(
    inputs, weight, output, epsilon, size, input_stride, TILE: tl.constexpr, HAS_PDL: tl.constexpr
):  # fmt: skip
    pdl_wait(HAS_PDL)
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    is_used = columns < size
    x = tl.load(inputs + row * input_stride + columns, mask=is_used, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=is_used, other=0.0)
    normed = (x * tl.rsqrt(tl.sum(x * x, axis=0) / size + epsilon)).to(inputs.dtype.element_ty)
    tl.store(output + row * size + columns, (normed * scale).to(output.dtype.element_ty), mask=is_used)


@triton.jit
def _silu_and_mul_kernel(
    gates, values, output, size, gate_stride, value_stride, TILE: tl.constexpr, HAS_PDL: tl.constexpr
):  # fmt: skip
    pdl_wait(HAS_PDL)
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_used = columns < size
    gate = tl.load(gates + row * gate_stride + columns, mask=is_used, other=0.0).to(tl.float32)
    value = tl.load(values + row * value_stride + columns, mask=is_used, other=0.0)
    activated = (gate * tl.sigmoid(gate)).to(output.dtype.element_ty)
    tl.store(output + row * size + columns, (activated * value).to(output.dtype.element_ty), mask=is_used)


def rms_norm(inputs: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    """RMS norm over the last axis, in the weight's dtype.

    It rounds where transformers' modules round: to the inputs' dtype before the weight is applied, and at the end.
    """
    size = inputs.shape[-1]
    rows = inputs.reshape(-1, size)
    output = torch.empty(rows.shape, dtype=weight_C.dtype, device=rows.device)
    tile = triton.next_power_of_2(size)
    _rms_norm_kernel[(len(rows),)](
        rows, weight_C, output, epsilon, size, rows.stride(0), TILE=tile, num_warps=2 if tile <= 1024 else 8,
        **get_launch_options(),
    )  # fmt: skip
    return output.view(inputs.shape)


def silu_and_mul(gate: Tensor, value: Tensor) -> Tensor:
    """SiLU(gate) * value (Shazeer, 2020)."""
    size = gate.shape[-1]
    gates, values = (each.reshape(-1, size) for each in (gate, value))
    output = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _silu_and_mul_kernel[(len(gates), triton.cdiv(size, GATE_TILE))](
        gates, values, output, size, gates.stride(0), values.stride(0), TILE=GATE_TILE, num_warps=4,
        **get_launch_options(),
    )  # fmt: skip
    return output


def merged_linear(inputs: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """One matrix product per group of merged weights (and merged biases, if any); one per weight that is not merged."""
    outputs: dict[int, Tensor] = {}
    for group in find_merged_groups(weights, biases):
        sizes = [len(weights[index]) for index in group.indices]
        parts = functional.linear(inputs, group.weight, group.bias).split(sizes, dim=-1)
        outputs.update(zip(group.indices, parts, strict=True))
    return [outputs[index] for index in range(len(weights))]


def add_linear(total: Tensor, inputs: Tensor, weight: Tensor, factor: float = 1.0) -> Tensor:
    """total += factor * inputs @ weight.T in the GEMM's epilogue: a 16-bit product is not rounded before."""
    rows, factors = total.view(-1, total.shape[-1]), inputs.view(-1, inputs.shape[-1])
    if total.dtype == weight.dtype:
        rows.addmm_(factors, weight.t(), alpha=factor)
    else:
        torch.addmm(rows, factors, weight.t(), out_dtype=total.dtype, alpha=factor, out=rows)
    return total
