"""The memory of the paged cache."""

from __future__ import annotations

import pytest
import torch

from tunesmith.engine.batch.kv_cache import build_zeros
from tunesmith.errors import ConfigError


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_cache_that_does_not_fit_names_what_to_lower(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", raise_out_of_memory)  # as on a GPU
    size = (1 << 40, 4, 1 << 20, 128)
    with pytest.raises(ConfigError, match=r"cannot be allocated: lower engine\.kv_cache_tokens, engine\.kv_cache_gib"):
        build_zeros(size, torch.bfloat16, torch.device(device))
