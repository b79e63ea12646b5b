"""What rewritten layers call on a CUDA device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tunesmith.engine.adjacent import join_neighbours
from tunesmith.engine.kernels.layer import gate_rows, norm_rows
from tunesmith.engine.kernels.paged_decode import attend_decoding
from tunesmith.engine.kernels.paged_prefill import attend_prefilling
from tunesmith.engine.rewrite import LayerFunctions


def multiply(inputs: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """One product where the weights, and the biases if there are any, lie side by side; else one each."""
    whole = join_neighbours(weights)
    given = [bias for bias in biases if bias is not None]
    bias = join_neighbours(given) if len(given) == len(weights) else None
    if whole is None or (given and bias is None):
        return [functional.linear(inputs, *layer) for layer in zip(weights, biases, strict=True)]
    return functional.linear(inputs, whole, bias).split([len(weight) for weight in weights], dim=-1)


def gate(inputs: Tensor, gate_weight: Tensor, value_weight: Tensor) -> Tensor:
    whole = join_neighbours((gate_weight, value_weight))
    if whole is None:
        both = torch.cat([functional.linear(inputs, weight) for weight in (gate_weight, value_weight)], dim=-1)
        return gate_rows(both)
    return gate_rows(functional.linear(inputs, whole))


def add_product(total: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
    """Add in the product's own epilogue."""
    total.view(-1, total.shape[-1]).addmm_(inputs.view(-1, inputs.shape[-1]), weight.t())
    return total


FUNCTIONS = LayerFunctions(
    norm=norm_rows,
    multiply=multiply,
    gate=gate,
    add_product=add_product,
    decode=attend_decoding,
    prefill=attend_prefilling,
)
