"""A decode step of recurrent layers on a GPU: each state is read and written once, in place.

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
    HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_used, weights = columns < size, weights + columns * (NUM_BEFORE + 1)
    state = states + tl.load(slots + row) * NUM_BEFORE * size + columns
    newest = tl.load(inputs + row * input_stride + columns, mask=is_used, other=0.0)
    wide = outputs.dtype.element_ty
    total = newest.to(wide) * tl.load(weights + NUM_BEFORE, mask=is_used, other=0.0).to(wide)
    for tap in tl.static_range(NUM_BEFORE):
        earlier = tl.load(state + tap * size, mask=is_used, other=0.0)
        total += earlier.to(wide) * tl.load(weights + tap, mask=is_used, other=0.0).to(wide)
        if tap > 0:
            tl.store(state + (tap - 1) * size, earlier, mask=is_used)
    tl.store(state + (NUM_BEFORE - 1) * size, newest, mask=is_used)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_used, other=0.0).to(wide)
    tl.store(outputs + row * size + columns, total, mask=is_used)


@triton.jit
def _step_kernel(
    queries, keys, values, decays, rates, states, slots, outputs, num_heads, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HAS_RATES: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0).to(tl.int64)  # of row and head
    rows, columns = tl.arange(0, BLOCK_K), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_row, is_column = rows < K, columns < V
    place = (tl.load(slots + item // num_heads) * num_heads + item % num_heads) * K * V
    places, is_inside = states + place + rows[:, None] * V + columns[None], is_row[:, None] & is_column[None]
    key = tl.load(keys + item * K + rows, mask=is_row, other=0.0)[:, None]
    query = tl.load(queries + item * K + rows, mask=is_row, other=0.0)[:, None]
    value = tl.load(values + item * V + columns, mask=is_column, other=0.0)
    state = tl.load(places, mask=is_inside, other=0.0) * tl.exp(tl.load(decays + item))
    if HAS_RATES:
        value = (value - tl.sum(state * key, 0)) * tl.load(rates + item)
    state += key * value[None]
    tl.store(places, state, mask=is_inside)
    tl.store(outputs + item * V + columns, tl.sum(state * query, 0), mask=is_column)


def step_conv(inputs_TC: Tensor, weight_CW: Tensor, bias: Tensor | None, states: Tensor, slots_T: Tensor) -> Tensor:
    """See `recurrent_ops.step_conv`."""
    num_tokens, size = inputs_TC.shape
    wide = torch.promote_types(inputs_TC.dtype, torch.float32)
    output_TC = torch.empty((num_tokens, size), dtype=wide, device=inputs_TC.device)
    weight_CW, block = weight_CW.contiguous(), 256
    inputs_TC = inputs_TC if inputs_TC.stride(1) == 1 else inputs_TC.contiguous()
    _conv_kernel[num_tokens, triton.cdiv(size, block)](
        inputs_TC, weight_CW, weight_CW if bias is None else bias, states, slots_T, output_TC, size,
        inputs_TC.stride(0), weight_CW.shape[1] - 1, bias is not None, block, num_warps=4,
    )  # fmt: skip
    return output_TC


def step_states(
    query_THK: Tensor,
    key_THK: Tensor,
    value_THV: Tensor,
    decay_TH: Tensor,
    rate_TH: Tensor | None,
    states: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """See `recurrent_ops.step_states`."""
    given = [each.contiguous() for each in (query_THK, key_THK, value_THV, decay_TH)]
    rates = decay_TH if rate_TH is None else rate_TH.contiguous()  # without rates nothing reads them
    output_THV = torch.empty_like(given[2])
    num_tokens, num_heads, size_k = query_THK.shape
    size_v, block_v = output_THV.shape[2], 32
    _step_kernel[num_tokens * num_heads, triton.cdiv(size_v, block_v)](
        *given, rates, states, slots_T, output_THV, num_heads, size_k, size_v, triton.next_power_of_2(size_k), block_v,
        rate_TH is not None,
    )  # fmt: skip
    return output_THV


torch.library.impl("tunesmith::step_conv", "CUDA")(step_conv)
torch.library.impl("tunesmith::step_states", "CUDA")(step_states)
