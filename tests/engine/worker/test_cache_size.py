"""The KV cache's share of a GPU's memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tunesmith.engine.worker.model_runner import measure_cache_bytes


@pytest.fixture(autouse=True)
def gpu_memory(monkeypatch):
    """100 GB free of 140."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * 10**9, 140 * 10**9))


def build_model() -> nn.Module:
    """A billion trained parameters, without memory."""
    model = nn.Linear(10**5, 10**4, bias=False, device="meta")
    model.device = torch.device("meta")
    return model


@pytest.mark.parametrize(("has_trainer", "free"), [(True, 100 - 16 - 42), (False, 100 - 42)])
def test_a_process_that_only_samples_keeps_no_memory_for_a_trainer(has_trainer, free):
    assert measure_cache_bytes(build_model(), has_trainer=has_trainer) == pytest.approx(free / 2 * 10**9)
