"""A decode step of the gated delta rule or of Mamba 2 on a GPU: each state is read and written once, in place.

Triton is installed on CUDA machines only, so import this file there only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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


def step_states(
    query_THK: Tensor,
    key_THK: Tensor,
    value_THV: Tensor,
    decay_TH: Tensor,
    rate_TH: Tensor | None,
    *,
    states: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """The inputs are those of `SegmentTable.apply_rule`; token t has the state [H, K, V] of slot t."""
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
