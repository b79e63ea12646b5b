"""The kernels of adapters equal their formula, and what they do not take equals it too.

They run on a GPU, or in Triton's interpreter where Triton is installed without one.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton")

from torch import Tensor

from tunesmith.engine.cuda.kernels import adapters

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float16, torch.bfloat16) if torch.cuda.is_available() else (torch.float16,)


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype) / shape[-1] ** 0.5


@pytest.mark.parametrize(
    ("sizes", "rank", "num_inputs", "num_rows", "is_merged", "has_kernel"),
    [
        ((256, 128, 128), 16, 1000, 5, True, True),
        ((128,), 8, 700, 33, True, True),
        ((192, 64), 24, 1536, 17, True, True),
        ((128, 128), 128, 256, 3, True, True),
        ((64, 64, 64), 1, 5000, 1, True, True),
        ((64,), 1, 8200, 1, True, False),  # more inputs and larger factors than the kernels are good at
        ((4096, 4096, 4096), 86, 16, 2, True, False),
        ((256, 128, 128), 128, 64, 4, True, False),  # too many outputs of first factors
        ((100,), 16, 64, 4, True, False),  # no whole tiles
        ((64,) * 4, 16, 64, 4, True, False),
        ((64, 64), 16, 64, 4, False, False),
        ((64, 64), 16, 64, 1025, True, False),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_wide_total", [False, True])
@torch.inference_mode()
def test_adapters_equal_their_formula(
    sizes: tuple[int, ...], rank: int, num_inputs: int, num_rows: int, is_merged: bool, has_kernel: bool,
    dtype: torch.dtype, has_wide_total: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if has_wide_total and (len(sizes) > 1 or (not has_kernel and DEVICE.type == "cpu")):
        pytest.skip("only an output alone is added to a float32 residual stream, which cuBLAS does on a GPU")
    torch.manual_seed(0)
    merged = torch.randn(1, num_rows, sum(sizes), device=DEVICE).to(torch.float32 if has_wide_total else dtype)
    totals = merged.split(list(sizes), dim=-1)
    downs = list(draw(len(sizes) * rank, num_inputs, dtype=dtype).split(rank))
    ups = list(draw(sum(sizes), rank, dtype=dtype).split(list(sizes)))
    if not is_merged:
        ups = [up.clone() for up in ups]
    inputs = torch.randn(1, num_rows, num_inputs, device=DEVICE).to(dtype)
    expected = [
        total.double() + 0.5 * (inputs.double() @ down.double().T).to(dtype).double() @ up.double().T
        for total, down, up in zip(totals, downs, ups, strict=True)
    ]
    calls = []
    merged_linear = adapters.merged_linear
    monkeypatch.setattr(adapters, "merged_linear", lambda *each: calls.append(each) or merged_linear(*each))
    found = adapters.add_adapters(totals, inputs, downs, ups, [0.5] * len(sizes))
    assert bool(calls) is not has_kernel
    for result, total, wanted in zip(found, totals, expected, strict=True):
        assert result.data_ptr() == total.data_ptr()
        tolerance = 4e-3 if dtype == torch.bfloat16 else 5e-4
        assert (total.double() - wanted).norm() < tolerance * wanted.norm()
