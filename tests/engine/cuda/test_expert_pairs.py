"""The kernel that sorts pairs of token and expert against a stable sort, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton")

from tunesmith.model.experts import sort_many_pairs
from tunesmith.model.kernels.expert_pairs import BLOCK, MAX_PAIRS, sort_pairs

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
