"""Gradients of linear layers' weights, accumulated in float32 by the matrix product that computes them.

Without this, autograd rounds each row's gradient of a 16-bit weight to 16 bits, casts it and adds it: three passes over
the gradients of all weights for every packed row. Here the product adds to the float32 gradient itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tunesmith.model.torch_modes import is_exact


@torch.library.custom_op("tunesmith::accumulate_weight_grad", mutates_args=("total",))
def accumulate_weight_grad(total: Tensor, grad: Tensor, inputs: Tensor) -> None:
    """total += grad.T @ inputs, in the dtype of the total."""
    torch.addmm(total, grad.t(), inputs, out_dtype=total.dtype, out=total)


@accumulate_weight_grad.register_fake
def _(total: Tensor, grad: Tensor, inputs: Tensor) -> None:
    return None


class _AccumulateGrad(torch.autograd.Function):
    """A linear layer; the weight's gradient is added to `total`, and autograd gets none."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, total: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight, total)
        ctx.has_bias = bias is not None
        return functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        inputs, weight, total = ctx.saved_tensors
        flat_grad = grad.reshape(-1, grad.shape[-1])  # one view for all products: compiled code stores it once
        accumulate_weight_grad(total, flat_grad, inputs.reshape(-1, inputs.shape[-1]))
        grad_inputs = (flat_grad @ weight).view(inputs.shape)
        return grad_inputs, None, flat_grad.sum(0) if ctx.has_bias else None, None


class _AccumulatingLinear(nn.Linear):
    """The class of a linear layer within `accumulated_weight_grads`."""

    weight_grad_total: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        return _AccumulateGrad.apply(inputs, self.weight, self.bias, self.weight_grad_total)


@contextmanager
def accumulated_weight_grads(model: PreTrainedModel) -> Iterator[None]:
    """Within, backward passes add to the float32 gradients of the decoder layers' 16-bit weights in place.

    A gradient that is None starts at zero. Gradients must not be replaced within.
    """
    layers = find_linear_layers(model)
    for layer in layers:
        weight = layer.weight
        total = torch.zeros_like(weight, dtype=torch.float32) if weight.grad is None else weight.grad
        layer.__dict__["weight_grad_total"] = total
        layer.__class__ = _AccumulatingLinear
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = nn.Linear
            layer.weight.grad = layer.__dict__.pop("weight_grad_total")


def find_linear_layers(model: PreTrainedModel) -> list[nn.Linear]:
    """The trained 16-bit linear layers with float32 gradients inside the decoder layers, on a GPU. With exact numerics
    fused products do the same."""
    if model.device.type != "cuda" or is_exact():
        return []
    decoder_layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    linears = {id(part): part for layer in decoder_layers for part in layer.modules() if type(part) is nn.Linear}
    return [
        layer
        for layer in linears.values()
        if layer.weight.requires_grad and layer.weight.dtype.itemsize == 2 and layer.weight.grad_dtype == torch.float32
    ]
