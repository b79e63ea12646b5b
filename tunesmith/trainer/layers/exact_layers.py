"""The sampler's fused layers with gradients (`model.numerics=exact`).

The forward of each operation is the sampler's kernel or product, so its bits are the same. The backward is a formula in
PyTorch, which torch compiles; it need not equal anything but itself in the next run. Weights' gradients are accumulated
in float32 where `grad_dtype` asks for it. Triton is installed on CUDA machines only, so import this file there only.

Axes: T tokens, N outputs of all products of an input, C features, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tunesmith.model.forward.fx_passes import FusedOps, compile_layer
from tunesmith.model.kernels import layer_ops
from tunesmith.model.kernels.logprob_kernels import compute_weight_grad
from tunesmith.model.merged_weights import get_merged_view
from tunesmith.trainer.tree_attention.kernels.exact_attention import attend_exactly, compute_norm_grads
from tunesmith.trainer.tree_attention.plan import exact_attention


class _Kernel(torch.autograd.Function):
    """`run(*tensors)`, with the gradients that `compute_grads(grad, *tensors)` returns."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], compute_grads: Callable[..., Any], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.compute_grads = compute_grads
        return run(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.compute_grads(grad, *(each.detach() for each in ctx.saved_tensors))


class _Products(torch.autograd.Function):
    """Products of one input with several weights, as `run(input, weights, biases)` computes them, added to `total` if
    it is given."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], total: Tensor | None, x: Tensor, *parameters: Tensor | None) -> Any:
        half = len(parameters) // 2
        ctx.save_for_backward(x)
        ctx.weights = parameters[:half]
        outputs = run(x, parameters[:half], parameters[half:])
        return outputs if isinstance(outputs, Tensor) else tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weights = ctx.saved_tensors, ctx.weights
        _, needs_total, needs_x, *needs = ctx.needs_input_grad
        grad_TN = (grads[0] if len(grads) == 1 else torch.cat(grads, dim=-1)).flatten(0, -2).to(x.dtype)
        parts = grad_TN.split([len(weight) for weight in weights], dim=1)
        rows = x.flatten(0, -2)
        of_weights = [
            compute_weight_grad(weight, part, rows) if need else None
            for weight, part, need in zip(weights, parts, needs, strict=False)
        ]
        of_biases = [part.sum(0) if need else None for part, need in zip(parts, needs[len(weights) :], strict=True)]
        grad_x = None
        if needs_x:
            merged = get_merged_view(weights)
            grad_x = (grad_TN @ (torch.cat(weights) if merged is None else merged)).view(x.shape)
        return None, grads[0] if needs_total else None, grad_x, *of_weights, *of_biases


@torch.compile(dynamic=True)
def compute_gate_grads(grad_TI: Tensor, gate_value_T2I: Tensor) -> tuple[Tensor]:
    gate, value = gate_value_T2I.float().chunk(2, dim=-1)
    share, grad = torch.sigmoid(gate), grad_TI.float()
    grads = grad * value * share * (1 + gate * (1 - share)), grad * gate * share
    return (torch.cat(grads, dim=-1).to(gate_value_T2I.dtype),)


def rms_norm(x: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    run, compute_grads = (partial(each, epsilon=epsilon) for each in (layer_ops.rms_norm, compute_norm_grads))
    return _Kernel.apply(run, compute_grads, x, weight_C)


def merged_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Sequence[Tensor]:
    return _Products.apply(layer_ops.merged_linear, None, x, *weights, *biases)


def swiglu(x: Tensor, gate_weight: Tensor, value_weight: Tensor) -> Tensor:
    def run(x: Tensor, weights: Sequence[Tensor], _: object) -> Tensor:
        return layer_ops.compute_gate_value(x, *weights)

    gate_value = _Products.apply(run, None, x, gate_weight, value_weight, None, None)
    return _Kernel.apply(layer_ops.silu_and_mul, compute_gate_grads, gate_value)


def add_linear(total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    def run(x: Tensor, weights: Sequence[Tensor], _: object) -> Tensor:
        return layer_ops.add_linear(total.detach().clone(), x, *weights)

    return _Products.apply(run, total, x, weight, None)


OPS = FusedOps(
    rms_norm=rms_norm,
    merged_linear=merged_linear,
    swiglu=swiglu,
    add_linear=add_linear,
    attention={exact_attention: attend_exactly},
    has_gradients=True,
)
run_exactly = partial(compile_layer, ops=OPS)
"""Backend of `torch.compile` for decoder layers and norms."""
