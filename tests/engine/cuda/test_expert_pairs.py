"""Kernels of pairs of token and expert against torch, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton")

from tunesmith.model.experts import sort_many_pairs
from tunesmith.model.kernels.expert_pairs import BLOCK, MAX_PAIRS, multiply_groups, sort_pairs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("num_experts", [1, 7, 128])
@pytest.mark.parametrize("num_pairs", [1, 24, BLOCK, 2 * BLOCK + 100])
def test_pairs_are_sorted_by_expert(num_pairs: int, num_experts: int) -> None:
    torch.manual_seed(0)
    experts = torch.randint(0, num_experts, (num_pairs,), device=DEVICE)
    order, place, ends = sort_pairs(experts, num_experts)
    assert torch.equal(order, torch.sort(experts, stable=True).indices)
    assert torch.equal(place[order], torch.arange(num_pairs, device=DEVICE))
    assert torch.equal(ends.long(), torch.bincount(experts, minlength=num_experts).cumsum(0))


def test_many_pairs_are_sorted_by_torch() -> None:
    experts = torch.arange(MAX_PAIRS + 1, device=DEVICE) % 5
    for order, place, ends in (sort_pairs(experts, 6), sort_many_pairs(experts, 6)):
        assert torch.equal(experts[order], experts.sort().values)
        assert torch.equal(place[order], torch.arange(len(experts), device=DEVICE))
        assert torch.equal(ends.long(), torch.bincount(experts, minlength=6).cumsum(0))


@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize("counts", [[0, 1, 70, 0, 5], [1], [0, 0, 3], [32, 33, 31, 64]])
def test_pairs_are_multiplied_with_the_weights_of_their_expert(counts: list[int], is_transposed: bool) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(sum(counts), 128, device=DEVICE).half()
    weights = torch.randn(len(counts), 128, 192, device=DEVICE).half()
    if not is_transposed:
        weights = weights.transpose(1, 2).contiguous().transpose(1, 2)
    found = multiply_groups(inputs, weights, torch.tensor(counts, device=DEVICE).cumsum(0).int())
    expected = torch.cat([a @ b for a, b in zip(inputs.double().split(counts), weights.double(), strict=True)])
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=2e-2)
