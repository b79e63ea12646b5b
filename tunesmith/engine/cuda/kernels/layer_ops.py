"""The CUDA implementations that fused decoder layers call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tunesmith.engine.cuda.fx_passes import FusedOps
from tunesmith.engine.cuda.kernels.paged_decode import run_paged_decode
from tunesmith.engine.cuda.kernels.paged_prefill import run_paged_prefill
from tunesmith.engine.cuda.kernels.rowwise import rms_norm, silu_and_mul
from tunesmith.engine.cuda.merged_weights import find_merged_groups, get_merged_view


def merged_linear(inputs: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """One matrix product per group of merged weights (and merged biases, if any); one per weight that is not merged."""
    outputs: dict[int, Tensor] = {}
    for group in find_merged_groups(weights, biases):
        merged, bias = get_merged_view([weights[index] for index in group]), None
        present = [bias for bias in (biases[index] for index in group) if bias is not None]
        assert merged is not None
        if present:
            bias = get_merged_view(present)
        sizes = [len(weights[index]) for index in group]
        outputs.update(zip(group, functional.linear(inputs, merged, bias).split(sizes, dim=-1), strict=True))
    return [outputs[index] for index in range(len(weights))]


def swiglu(inputs: Tensor, gate_weight: Tensor, value_weight: Tensor) -> Tensor:
    """SiLU(inputs @ gate_weight.T) * (inputs @ value_weight.T) (Shazeer, 2020)."""
    merged = get_merged_view((gate_weight, value_weight))
    if merged is None:
        gate_value = torch.cat([functional.linear(inputs, weight) for weight in (gate_weight, value_weight)], dim=-1)
        return silu_and_mul(gate_value)
    return silu_and_mul(functional.linear(inputs, merged))


def add_linear(total: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
    """total += inputs @ weight.T in the GEMM's epilogue; a 16-bit product is not rounded before a float32 total."""
    rows, factors = total.view(-1, total.shape[-1]), inputs.view(-1, inputs.shape[-1])
    if total.dtype == weight.dtype:
        rows.addmm_(factors, weight.t())
    else:
        torch.addmm(rows, factors, weight.t(), out_dtype=total.dtype, out=rows)
    return total


CUDA_OPS = FusedOps(
    rms_norm=rms_norm,
    merged_linear=merged_linear,
    swiglu=swiglu,
    add_linear=add_linear,
    paged_decode=run_paged_decode,
    paged_prefill=run_paged_prefill,
)
