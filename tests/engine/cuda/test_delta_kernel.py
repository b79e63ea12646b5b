"""The decode kernel of the delta rule and of Mamba 2 against the chunk form, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton")

from tunesmith.model.forward.recurrence import MATRIX, Segment, SegmentTable
from tunesmith.model.kernels.delta_step import step_states

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("has_rates", [True, False])
@pytest.mark.parametrize(("size_k", "size_v"), [(8, 6), (128, 128), (64, 96)])
def test_a_step_reads_and_writes_the_states_of_its_slots(size_k: int, size_v: int, has_rates: bool) -> None:
    torch.manual_seed(0)
    num_tokens, num_heads = 5, 3
    query, key = (torch.randn(num_tokens, num_heads, size_k, device=DEVICE) for _ in range(2))
    value = torch.randn(num_tokens, 2 * num_heads * size_v, device=DEVICE)[:, ::2].view(num_tokens, num_heads, size_v)
    decay, rate = (torch.rand(num_tokens, num_heads, device=DEVICE) for _ in range(2))
    inputs = (query, key / key.norm(dim=-1, keepdim=True), value, -decay, rate if has_rates else None)
    slots = torch.tensor([6, 0, 3, 1, 5], device=DEVICE)
    states = torch.randn(8, num_heads, size_k, size_v, device=DEVICE)
    expected_states = {0: {MATRIX: states.clone()}}
    rows = [Segment(start=row, end=row + 1, source=slot, targets=(slot,)) for row, slot in enumerate(slots.tolist())]
    expected = SegmentTable(rows, DEVICE, expected_states).apply_rule(0, *inputs)
    found = step_states(*inputs, states=states, slots_T=slots)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states, expected_states[0][MATRIX], atol=1e-5, rtol=1e-5)
