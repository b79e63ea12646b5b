"""What captures leave in the memory of a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tunesmith.model.forward.graph_store import GraphStore

pytestmark = pytest.mark.gpu

WORKSPACE = 2**23
"""The least that cuBLAS keeps for a stream, in bytes."""


def test_further_captures_keep_no_further_workspace():
    model = nn.Linear(64, 64, device="cuda")
    store = GraphStore[torch.Tensor](model)
    rows = torch.ones(4, 64, device="cuda")
    store.capture(0, lambda: model(rows))
    before = torch.cuda.memory_allocated()
    for key in range(1, 9):
        store.capture(key, lambda: model(rows))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < WORKSPACE
    torch.testing.assert_close(store.find(8).replay(), model(rows))
