"""The decode kernels of recurrent layers against the form for rows of segments, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton")

from tunesmith.model.forward.recurrence import CONV, MATRIX, Segment, SegmentTable
from tunesmith.model.kernels.recurrent_steps import step_conv, step_states

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS = torch.tensor([6, 0, 3, 1, 5], device=DEVICE)


def build_table(name: str, states: torch.Tensor) -> SegmentTable:
    """One token for each slot, of copies of the states."""
    rows = [Segment(start=row, end=row + 1, source=slot, targets=(slot,)) for row, slot in enumerate(SLOTS.tolist())]
    return SegmentTable(rows, DEVICE, {0: {name: states.clone()}}).select_layer(0)


@pytest.mark.parametrize("has_rates", [True, False])
@pytest.mark.parametrize(("size_k", "size_v"), [(8, 6), (128, 128), (64, 96)])
def test_a_step_reads_and_writes_the_states_of_its_slots(size_k: int, size_v: int, has_rates: bool) -> None:
    torch.manual_seed(0)
    num_tokens, num_heads = 5, 3
    query, key = (torch.randn(num_tokens, num_heads, size_k, device=DEVICE) for _ in range(2))
    value = torch.randn(num_tokens, 2 * num_heads * size_v, device=DEVICE)[:, ::2].view(num_tokens, num_heads, size_v)
    decay, rate = (torch.rand(num_tokens, num_heads, device=DEVICE) for _ in range(2))
    inputs = (query, key / key.norm(dim=-1, keepdim=True), value, -decay, rate if has_rates else None)
    states = torch.randn(8, num_heads, size_k, size_v, device=DEVICE)
    table = build_table(MATRIX, states)
    expected = table.apply_rule(*inputs)
    torch.testing.assert_close(step_states(*inputs, states, SLOTS), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states, table.layer_states[MATRIX], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("size", "num_taps"), [(40, 3), (300, 4), (256, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_convolution_reads_the_last_inputs_of_its_slots_and_moves_them_on(
    dtype: torch.dtype, size: int, num_taps: int, has_bias: bool
) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(5, 2 * size, device=DEVICE).to(dtype)[:, size:]  # a part of a product's output
    weight, bias = torch.randn(size, num_taps, device=DEVICE).to(dtype), torch.randn(size, device=DEVICE).to(dtype)
    states = torch.randn(8, num_taps - 1, size, device=DEVICE).to(dtype)
    table = build_table(CONV, states)
    expected = table.convolve(inputs, weight, bias if has_bias else None)
    found = step_conv(inputs, weight, bias if has_bias else None, states, SLOTS)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(states, table.layer_states[CONV])
