"""What rewritten layers call on a CUDA device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tunesmith.engine.cuda.fx_passes import LayerFunctions
from tunesmith.engine.cuda.kernels.layer import gate_rows, norm_rows
from tunesmith.engine.cuda.kernels.paged_decode import attend_decoding
from tunesmith.engine.cuda.kernels.paged_prefill import attend_prefilling
from tunesmith.engine.cuda.merged_weights import find_runs, join_neighbours


def multiply(inputs: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """One product for weights, and biases if they have any, that lie side by side; one each for others."""
    outputs: dict[int, Tensor] = {}
    for run in find_runs(weights, biases):
        whole, bias = join_neighbours([weights[index] for index in run]), None
        given = [bias for bias in (biases[index] for index in run) if bias is not None]
        assert whole is not None
        if given:
            bias = join_neighbours(given)
        sizes = [len(weights[index]) for index in run]
        outputs.update(zip(run, functional.linear(inputs, whole, bias).split(sizes, dim=-1), strict=True))
    return [outputs[index] for index in range(len(weights))]


def gate(inputs: Tensor, gate_weight: Tensor, value_weight: Tensor) -> Tensor:
    whole = join_neighbours((gate_weight, value_weight))
    if whole is None:
        both = torch.cat([functional.linear(inputs, weight) for weight in (gate_weight, value_weight)], dim=-1)
        return gate_rows(both)
    return gate_rows(functional.linear(inputs, whole))


def add_product(total: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
    """Add in the product's own epilogue; a product of 16 bits is not rounded before it joins a float32 total."""
    rows, factors = total.view(-1, total.shape[-1]), inputs.view(-1, inputs.shape[-1])
    if total.dtype == weight.dtype:
        rows.addmm_(factors, weight.t())
    else:
        torch.addmm(rows, factors, weight.t(), out_dtype=total.dtype, out=rows)
    return total


FUNCTIONS = LayerFunctions(
    norm=norm_rows,
    multiply=multiply,
    gate=gate,
    add_product=add_product,
    decode=attend_decoding,
    prefill=attend_prefilling,
)
