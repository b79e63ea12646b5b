"""The operations of a fused layer with gradients: values are the bits of `layer_ops`, gradients those of the formulas.

Gradients of 16-bit weights are accumulated in float32 by `accumulate_weight_grads`.

Axes: T tokens, C hidden size, I intermediate size, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from tunesmith.model.kernels import layer_ops
from tunesmith.model.kernels.heads import load_heads
from tunesmith.model.kernels.logprob_kernels import compute_weight_grad
from tunesmith.model.merged_weights import accumulate_weight_grads, find_merged_groups, get_merged_view

TILE = 2048
"""Elements that a program takes at once."""
MAX_PROGRAMS = 1024
"""Bounds the memory of the partial sums of a norm weight's gradient."""


@triton.jit
def _norm_and_rotate_kernel(
    heads, cos, sin, weight, output, epsilon, num_rows, stride_t, stride_h, cos_stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr,
):  # fmt: skip
    rows, sizes = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE_PAD)
    rows = rows.to(tl.int64)
    tokens, is_row = rows // HEADS, rows < num_rows
    heads_RD = load_heads(
        heads + tokens * stride_t + (rows % HEADS) * stride_h, cos + tokens * cos_stride, sin + tokens * cos_stride,
        weight, epsilon, is_row, SIZE, SIZE_PAD, HAS_NORM, HAS_ROPE,
    )  # fmt: skip
    is_used = is_row[:, None] & (sizes < SIZE)[None, :]
    tl.store(output + rows[:, None] * SIZE + sizes[None, :], heads_RD, mask=is_used)


@triton.jit
def _norm_and_rotate_backward_kernel(
    heads, cos, sin, weight, grad, grad_heads, weight_sums, epsilon, num_rows, stride_t, stride_h, cos_stride,
    output_stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr, HAS_WEIGHT_GRAD: tl.constexpr,
):  # fmt: skip
    """The gradient of `load_heads`; each program writes its part of the weight's gradient, which has a fixed order."""
    sizes = tl.arange(0, SIZE_PAD)
    is_size, is_first_half = sizes < SIZE, (sizes < SIZE // 2)[None, :]
    if HAS_NORM:
        weight_D = tl.load(weight + sizes, mask=is_size, other=0.0).to(tl.float32)[None, :]
    partner = tl.where(sizes < SIZE // 2, sizes + SIZE // 2, sizes - SIZE // 2)
    sums = tl.zeros((SIZE_PAD,), tl.float32)
    for start in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        is_used = (rows < num_rows)[:, None] & is_size[None, :]
        tokens, places = (rows // HEADS)[:, None], rows[:, None] * SIZE
        slopes = tl.load(grad + places + sizes[None, :], mask=is_used, other=0.0).to(tl.float32)
        if HAS_ROPE:  # element i of the first half went to i + D / 2 times the sine there, and that one back, negated
            angles = tokens * cos_stride
            partner_slopes = tl.load(grad + places + partner[None, :], mask=is_used, other=0.0).to(tl.float32)
            partner_sine = tl.load(sin + angles + partner[None, :], mask=is_used, other=0.0).to(tl.float32)
            rotated = partner_slopes * partner_sine
            cosine = tl.load(cos + angles + sizes[None, :], mask=is_used, other=0.0).to(tl.float32)
            slopes = slopes * cosine + tl.where(is_first_half, rotated, -rotated)
        if HAS_NORM:
            x_places = tokens * stride_t + (rows % HEADS)[:, None] * stride_h + sizes[None, :]
            x = tl.load(heads + x_places, mask=is_used, other=0.0).to(tl.float32)
            inverse = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + epsilon)[:, None]
            normed = x * inverse
            sums += tl.sum(slopes * normed, axis=0)
            slopes *= weight_D
            slopes = inverse * (slopes - normed * (tl.sum(slopes * normed, axis=1) / SIZE)[:, None])
        output_places = tokens * output_stride + (rows % HEADS)[:, None] * SIZE + sizes[None, :]
        tl.store(grad_heads + output_places, slopes.to(grad_heads.dtype.element_ty), mask=is_used)
    if HAS_WEIGHT_GRAD:
        tl.store(weight_sums + tl.program_id(0) * SIZE + sizes, sums, mask=is_size)


@triton.jit
def _silu_and_mul_backward_kernel(gates, values, grad, output, size, gate_stride, value_stride, TILE: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_used = columns < size
    gate = tl.load(gates + row * gate_stride + columns, mask=is_used, other=0.0).to(tl.float32)
    value = tl.load(values + row * value_stride + columns, mask=is_used, other=0.0).to(tl.float32)
    slope = tl.load(grad + row * size + columns, mask=is_used, other=0.0).to(tl.float32)
    weight, place = tl.sigmoid(gate), row * 2 * size + columns
    grad_gate = slope * value * weight * (1.0 + gate * (1.0 - weight))
    tl.store(output + place, grad_gate.to(output.dtype.element_ty), mask=is_used)
    tl.store(output + place + size, (slope * gate * weight).to(output.dtype.element_ty), mask=is_used)


Angles = tuple[Tensor, Tensor]
"""Cosines and sines [1, T, D] of a rotary embedding."""


def _describe_heads(
    heads_1HTD: Tensor, angles: Angles | None, weight: Tensor | None
) -> tuple[list[Tensor], list[Any], dict[str, Any]]:
    """Inputs, sizes and strides, and options, that both kernels of heads have."""
    _, num_heads, num_tokens, size = heads_1HTD.shape
    size_pad = triton.next_power_of_2(size)
    cos_stride = 0 if angles is None else angles[0].stride(1)
    inputs = [heads_1HTD, *(angles or (heads_1HTD, heads_1HTD)), heads_1HTD if weight is None else weight]
    return inputs, [num_heads * num_tokens, heads_1HTD.stride(2), heads_1HTD.stride(1), cos_stride], {
        "HEADS": num_heads, "SIZE": size, "SIZE_PAD": size_pad, "ROWS": max(TILE // size_pad, 1),
        "HAS_NORM": weight is not None, "HAS_ROPE": angles is not None, "num_warps": 4 if size_pad <= TILE else 8,
    }  # fmt: skip


def norm_and_rotate(heads_1HTD: Tensor, angles: Angles | None, weight: Tensor | None, epsilon: float) -> Tensor:
    """RMS norm, given its weight, and rotary embedding, given its angles; stored token by token."""
    inputs, sizes, options = _describe_heads(heads_1HTD, angles, weight)
    _, num_heads, num_tokens, size = heads_1HTD.shape
    output = heads_1HTD.new_empty((1, num_tokens, num_heads, size))
    _norm_and_rotate_kernel[(triton.cdiv(sizes[0], options["ROWS"]),)](*inputs, output, epsilon, *sizes, **options)
    return output.transpose(1, 2)


def backward_norm_and_rotate(
    heads_1HTD: Tensor, grad_1HTD: Tensor, angles: Angles | None, weight: Tensor | None, epsilon: float,
    output_1THD: Tensor, *, has_weight_grad: bool,
) -> Tensor | None:  # fmt: skip
    """Write the gradient of the heads to `output_1THD`, and return that of the weight in float32."""
    inputs, sizes, options = _describe_heads(heads_1HTD, angles, weight)
    grad_1THD = grad_1HTD.transpose(1, 2).contiguous()
    num_programs = min(triton.cdiv(sizes[0], options["ROWS"]), MAX_PROGRAMS)
    sums = grad_1THD.new_empty((num_programs, options["SIZE"] if has_weight_grad else 0), dtype=torch.float32)
    _norm_and_rotate_backward_kernel[(num_programs,)](
        *inputs, grad_1THD, output_1THD, sums, epsilon, *sizes, output_1THD.stride(1),
        HAS_WEIGHT_GRAD=has_weight_grad, **options,
    )  # fmt: skip
    return sums.sum(0) if has_weight_grad else None


def backward_silu_and_mul(gate: Tensor, value: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the gate and of the value, side by side in memory."""
    size = gate.shape[-1]
    gates, values = (each.reshape(-1, size) for each in (gate, value))
    output = gate.new_empty((*gate.shape[:-1], 2 * size))
    _silu_and_mul_backward_kernel[(len(gates), triton.cdiv(size, layer_ops.GATE_TILE))](
        gates, values, grad.contiguous(), output, size, gates.stride(0), values.stride(0),
        TILE=layer_ops.GATE_TILE, num_warps=4,
    )  # fmt: skip
    return output[..., :size], output[..., size:]


def _backward_products(
    needs: Sequence[bool], inputs: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs and of each weight, if needed, from those of the products. Merged weights take one
    product, since small ones leave multiprocessors idle."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    flat = [grad.reshape(-1, grad.shape[-1]).to(inputs.dtype) for grad in grads]
    total: Tensor | None = None
    found: list[Tensor | None] = [None] * len(weights)
    for group in find_merged_groups(weights, [None] * len(weights)):
        grad = _join_columns([flat[index] for index in group.indices])
        if needs[0]:
            total = grad @ group.weight if total is None else total.addmm_(grad, group.weight)
        trained = [index for index in group.indices if needs[1 + index]]
        if len(trained) == len(group.indices) and accumulate_weight_grads([weights[i] for i in trained], grad, rows):
            continue
        for index in trained:
            found[index] = compute_weight_grad(weights[index], flat[index], rows)
    return None if total is None else total.view(inputs.shape), *found


def _join_columns(parts: Sequence[Tensor]) -> Tensor:
    """The parts side by side, without a copy if they already are."""
    joined = get_merged_view([part.t() for part in parts])
    return torch.cat(list(parts), dim=-1) if joined is None else joined.t()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.epsilon = epsilon
        return layer_ops.rms_norm(inputs, weight, epsilon)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        rows, grad = (each.reshape(1, 1, -1, each.shape[-1]) for each in (inputs, grad))
        output = torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
        grad_weight = backward_norm_and_rotate(
            rows, grad, None, weight, ctx.epsilon, output.view_as(rows.transpose(1, 2)),
            has_weight_grad=ctx.needs_input_grad[1],
        )  # fmt: skip
        return output, grad_weight, None


class _MergedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, *layers: Tensor | None) -> tuple[Tensor, ...]:
        """`layers`: the weights, then the biases."""
        num_layers = len(layers) // 2
        ctx.save_for_backward(inputs)
        ctx.weights = layers[:num_layers]
        return tuple(layer_ops.merged_linear(inputs, ctx.weights, layers[num_layers:]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,), num_layers = ctx.saved_tensors, len(grads)
        needs, needs_bias = ctx.needs_input_grad[: 1 + num_layers], ctx.needs_input_grad[1 + num_layers :]
        biases = [grad.flatten(0, -2).sum(0) if each else None for grad, each in zip(grads, needs_bias, strict=True)]
        return *_backward_products(needs, inputs, ctx.weights, grads), *biases


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(gate, value)
        return layer_ops.silu_and_mul(gate, value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, value = ctx.saved_tensors
        return backward_silu_and_mul(gate, value, grad)


class _AddLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, inputs: Tensor, weight: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight, ctx.factor = weight, factor
        return layer_ops.add_linear(total.clone(), inputs, weight, factor)  # the norm before needs its input

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,), scaled = ctx.saved_tensors, grad if ctx.factor == 1 else grad * ctx.factor
        return grad, *_backward_products(ctx.needs_input_grad[1:3], inputs, [ctx.weight], [scaled]), None


def rms_norm(inputs: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    return _RMSNorm.apply(inputs, weight_C, epsilon)


def merged_linear(inputs: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Sequence[Tensor]:
    return _MergedLinear.apply(inputs, *weights, *biases)


def silu_and_mul(gate: Tensor, value: Tensor) -> Tensor:
    return _SiluAndMul.apply(gate, value)


def add_linear(total: Tensor, inputs: Tensor, weight: Tensor, factor: float = 1.0) -> Tensor:
    """Unlike `layer_ops.add_linear` not in place."""
    return _AddLinear.apply(total, inputs, weight, factor)
