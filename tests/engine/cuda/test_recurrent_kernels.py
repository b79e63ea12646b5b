"""The decode kernels of recurrent layers against the form for rows of segments, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton")

from tunesmith.model.forward.recurrence import CONV, MATRIX, NORM_EPSILON, Segment, SegmentTable
from tunesmith.model.kernels.recurrent_steps import invert_unit_lower, step_conv, step_delta, step_states

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS = torch.tensor([6, 0, 3, 1, 5], device=DEVICE)


def build_table(name: str, states: torch.Tensor) -> SegmentTable:
    """One token for each slot, of copies of the states."""
    rows = [Segment(start=row, end=row + 1, source=slot, targets=(slot,)) for row, slot in enumerate(SLOTS.tolist())]
    return SegmentTable(rows, DEVICE, {0: {name: states.clone()}}).select_layer(0)


def split_row(*parts: torch.Tensor) -> list[torch.Tensor]:
    """The parts as slices of the output of one product."""
    return list(torch.cat(parts, 1).split([each.shape[1] for each in parts], 1))


@pytest.mark.parametrize(("num_key_heads", "size_k", "size_v"), [(3, 8, 6), (1, 128, 128), (6, 64, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_the_delta_rule_reads_and_writes_the_states_of_its_slots(
    dtype: torch.dtype, num_key_heads: int, size_k: int, size_v: int
) -> None:
    torch.manual_seed(0)
    num_heads, key_dim = 6, num_key_heads * size_k
    module = SimpleNamespace(
        A_log=torch.randn(num_heads, device=DEVICE).to(dtype), dt_bias=torch.randn(num_heads, device=DEVICE).to(dtype),
        key_dim=key_dim, value_dim=num_heads * size_v, num_k_heads=num_key_heads, num_v_heads=num_heads,
        head_k_dim=size_k, head_v_dim=size_v,
    )  # fmt: skip
    mixed, rate, step = split_row(
        *(torch.randn(5, size, device=DEVICE).to(dtype) for size in (2 * key_dim + module.value_dim, num_heads)),
        torch.linspace(-30, 30, 5 * num_heads, device=DEVICE).to(dtype).view(5, num_heads),
    )
    states = torch.randn(8, num_heads, size_k, size_v, device=DEVICE)
    table = build_table(MATRIX, states)
    expected = table.apply_delta(module, mixed, rate, step)
    found = step_delta(mixed, rate, step, module.A_log, module.dt_bias, NORM_EPSILON, states, SLOTS)
    assert found.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2  # the interpreter cuts off bits of rates
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(states, table.layer_states[MATRIX], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("size_k", "size_v"), [(8, 6), (128, 128), (64, 96)])
def test_a_step_of_mamba_2_reads_and_writes_the_states_of_its_slots(size_k: int, size_v: int) -> None:
    torch.manual_seed(0)
    num_heads = 3
    query, key = (torch.randn(5, num_heads, size_k, device=DEVICE) for _ in range(2))
    value = torch.randn(5, 2 * num_heads * size_v, device=DEVICE)[:, ::2].view(5, num_heads, size_v)
    inputs = (query, key, value, -torch.rand(5, num_heads, device=DEVICE))
    states = torch.randn(8, num_heads, size_k, size_v, device=DEVICE)
    table = build_table(MATRIX, states)
    expected = table.apply_rule(*inputs)
    torch.testing.assert_close(step_states(*inputs, states, SLOTS), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states, table.layer_states[MATRIX], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("has_silu", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("size", "num_taps"), [(40, 3), (300, 4), (256, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_convolution_reads_the_last_inputs_of_its_slots_and_moves_them_on(
    dtype: torch.dtype, size: int, num_taps: int, has_bias: bool, has_silu: bool
) -> None:
    torch.manual_seed(0)
    inputs = split_row(*(torch.randn(5, size, device=DEVICE).to(dtype) for _ in range(2)))[1]
    weight, bias = torch.randn(size, num_taps, device=DEVICE).to(dtype), None
    if has_bias:
        bias = torch.randn(size, device=DEVICE).to(dtype)
    states = torch.randn(8, num_taps - 1, size, device=DEVICE).to(dtype)
    table = build_table(CONV, states)
    expected = table.convolve(inputs, SimpleNamespace(weight=weight[:, None], bias=bias), has_silu=has_silu)
    found = step_conv(inputs, weight, bias, has_silu, states, SLOTS)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(states, table.layer_states[CONV])


@pytest.mark.parametrize("size", [2, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverses_of_triangular_matrices_of_a_chunk(dtype: torch.dtype, size: int) -> None:
    """Values on and above the diagonal are not read. The worst case has equal keys and rates of 1."""
    torch.manual_seed(0)
    matrices = torch.rand(2, 3, size, size, device=DEVICE, dtype=dtype)
    matrices[0, 0] = 1.0
    identity = torch.eye(size, device=DEVICE, dtype=dtype)
    expected = torch.linalg.inv((matrices.tril(-1) + identity).double())
    error = (invert_unit_lower(matrices) - expected).abs().amax((2, 3)) / expected.abs().amax((2, 3))
    assert error.max() < (1e-12 if dtype == torch.float64 else 1e-5)
