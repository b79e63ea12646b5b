"""Kernels of recurrent layers: a decode step, which reads and writes each state once, in place, and the triangular
inverses of a row's chunks.

Triton is installed on CUDA machines only, so import this file there only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _conv_kernel(
    inputs, weights, bias, states, slots, outputs, size, input_stride, NUM_BEFORE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_used = columns < size
    places = weights + columns * (NUM_BEFORE + 1)
    state = states + tl.load(slots + row) * NUM_BEFORE * size + columns
    newest = tl.load(inputs + row * input_stride + columns, mask=is_used, other=0.0)
    total = newest.to(tl.float32) * tl.load(places + NUM_BEFORE, mask=is_used, other=0.0).to(tl.float32)
    for tap in tl.static_range(NUM_BEFORE):
        earlier = tl.load(state + tap * size, mask=is_used, other=0.0)
        total += earlier.to(tl.float32) * tl.load(places + tap, mask=is_used, other=0.0).to(tl.float32)
        if tap > 0:
            tl.store(state + (tap - 1) * size, earlier, mask=is_used)
    tl.store(state + (NUM_BEFORE - 1) * size, newest, mask=is_used)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_used, other=0.0).to(tl.float32)
    if HAS_SILU:
        total = total * tl.sigmoid(total)
    tl.store(outputs + row * size + columns, total.to(outputs.dtype.element_ty), mask=is_used)


@triton.jit
def _step_kernel(
    queries, keys, values, decays, rates, a_logs, biases, states, slots, outputs, num_heads, repeats, key_stride,
    value_stride, decay_stride, scale, epsilon, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, NUM_BLOCKS: tl.constexpr, IS_DELTA: tl.constexpr,
):  # fmt: skip
    # adjacent programs read adjacent columns of a state
    item, block = tl.program_id(0).to(tl.int64) // NUM_BLOCKS, tl.program_id(0) % NUM_BLOCKS
    row, head = item // num_heads, item % num_heads
    rows, columns = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    is_row, is_column = rows < K, columns < V
    place = (tl.load(slots + row) * num_heads + head) * K * V
    places, is_inside = states + place + rows[:, None] * V + columns[None], is_row[:, None] & is_column[None]
    key_place = row * key_stride + head // repeats * K + rows
    key = tl.load(keys + key_place, mask=is_row, other=0.0).to(tl.float32)
    query = tl.load(queries + key_place, mask=is_row, other=0.0).to(tl.float32)
    value = tl.load(values + row * value_stride + head * V + columns, mask=is_column, other=0.0).to(tl.float32)
    decay = tl.load(decays + row * decay_stride + head).to(tl.float32)
    if IS_DELTA:
        key = key * tl.rsqrt(tl.sum(key * key, 0) + epsilon)
        query = query * tl.rsqrt(tl.sum(query * query, 0) + epsilon) * scale
        step = decay + tl.load(biases + head).to(tl.float32)
        step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))  # softplus
        decay = -tl.exp(tl.load(a_logs + head).to(tl.float32)) * step
    state = tl.load(places, mask=is_inside, other=0.0) * tl.exp(decay)
    if IS_DELTA:
        rate = tl.sigmoid(tl.load(rates + row * decay_stride + head).to(tl.float32)).to(rates.dtype.element_ty)
        value = (value - tl.sum(state * key[:, None], 0)) * rate.to(tl.float32)
    state += key[:, None] * value[None]
    tl.store(places, state, mask=is_inside)
    output = tl.sum(state * query[:, None], 0).to(outputs.dtype.element_ty)
    tl.store(outputs + item * V + columns, output, mask=is_column)


@triton.jit
def _invert_kernel(matrices, outputs, SIZE: tl.constexpr):
    first, rows, columns = tl.program_id(0).to(tl.int64) * SIZE * SIZE, tl.arange(0, SIZE), tl.arange(0, SIZE)
    inverse = (rows[:, None] == columns[None]).to(outputs.dtype.element_ty)
    for row in range(1, SIZE):  # forward substitution; rows from this one on are still those of I
        below = tl.load(matrices + first + row * SIZE + rows, mask=rows < row, other=0.0)
        change = tl.sum(below[:, None] * inverse, 0)
        inverse -= tl.where(rows[:, None] == row, change[None], 0.0)
    tl.store(outputs + first + rows[:, None] * SIZE + columns[None], inverse)


def step_conv(
    inputs_TC: Tensor, weight_CW: Tensor, bias: Tensor | None, has_silu: bool, states: Tensor, slots_T: Tensor
) -> Tensor:
    """See `recurrent_ops.step_conv`."""
    num_tokens, size = inputs_TC.shape
    output_TC = inputs_TC.new_empty((num_tokens, size))
    inputs_TC, weight_CW, block = _align(inputs_TC), weight_CW.contiguous(), 256
    _conv_kernel[num_tokens, triton.cdiv(size, block)](
        inputs_TC, weight_CW, weight_CW if bias is None else bias, states, slots_T, output_TC, size,
        inputs_TC.stride(0), weight_CW.shape[1] - 1, bias is not None, has_silu, block, num_warps=4,
    )  # fmt: skip
    return output_TC


def step_delta(
    mixed_TC: Tensor,
    rate_TH: Tensor,
    step_TH: Tensor,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    epsilon: float,
    states: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """See `recurrent_ops.step_delta`."""
    _, num_heads, _, size_v = states.shape
    size = (mixed_TC.shape[1] - num_heads * size_v) // 2
    query, key, value = _align(mixed_TC).split([size, size, num_heads * size_v], 1)
    output_THV = mixed_TC.new_empty((len(mixed_TC), num_heads, size_v))
    _step(query, key, value, step_TH, states, slots_T, output_THV, (rate_TH, a_log_H, dt_bias_H), epsilon)
    return output_THV


def step_states(
    query_THK: Tensor, key_THK: Tensor, value_THV: Tensor, decay_TH: Tensor, states: Tensor, slots_T: Tensor
) -> Tensor:
    """See `recurrent_ops.step_states`."""
    query, key, value = (each.flatten(1) for each in (query_THK, key_THK, value_THV))
    output_THV = value_THV.new_empty(value_THV.shape)
    _step(query, key, value, decay_TH, states, slots_T, output_THV)
    return output_THV


def _step(
    query: Tensor, key: Tensor, value: Tensor, decay_TH: Tensor, states: Tensor, slots_T: Tensor, output_THV: Tensor,
    delta: tuple[Tensor, Tensor, Tensor] | None = None, epsilon: float = 0.0,
) -> None:  # fmt: skip
    num_tokens, num_heads, size_v = output_THV.shape
    size_k, block_v = states.shape[2], 32
    num_blocks = triton.cdiv(size_v, block_v)
    query, key, value, decay_TH = map(_align, (query, key, value, decay_TH))
    if query.stride(0) != key.stride(0):
        query, key = query.contiguous(), key.contiguous()
    rate_TH, *rest = delta or (decay_TH, decay_TH, decay_TH)  # without the delta rule nothing reads them
    rate_TH = _align(rate_TH)
    if rate_TH.stride(0) != decay_TH.stride(0):
        rate_TH, decay_TH = rate_TH.contiguous(), decay_TH.contiguous()
    _step_kernel[(num_tokens * num_heads * num_blocks,)](
        query, key, value, decay_TH, rate_TH, *rest, states, slots_T, output_THV, num_heads,
        num_heads * size_k // key.shape[1], key.stride(0), value.stride(0), decay_TH.stride(0), size_k**-0.5,
        epsilon, size_k, size_v, triton.next_power_of_2(size_k), block_v, num_blocks,
        delta is not None,
    )  # fmt: skip


def invert_unit_lower(matrices_NHLL: Tensor) -> Tensor:
    """See `recurrent_ops.invert_unit_lower`."""
    matrices, size = matrices_NHLL.contiguous(), matrices_NHLL.shape[-1]
    outputs = torch.empty_like(matrices)
    _invert_kernel[(matrices.numel() // size**2,)](matrices, outputs, size, num_warps=4 if size > 32 else 1)
    return outputs


def _align(rows: Tensor) -> Tensor:
    """Rows of adjacent values, at any distance."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


for _function in (step_conv, step_delta, step_states, invert_unit_lower):
    torch.library.impl(f"tunesmith::{_function.__name__}", "CUDA")(_function)
