"""LoRA dropout: off except within `active_dropout` in a training forward, with masks fixed by a seed.

The rest of the model stays in eval mode. Masks depend on the seed and on how tokens are packed, so a resumed run, which
uses the same seed for the same step, drops the same values. The engine samples without dropout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


def find_dropouts(model: nn.Module) -> list[nn.Dropout]:
    """The adapter's dropout layers with a positive probability; none without an adapter."""
    holders = [getattr(module, "lora_dropout", None) for module in model.modules()]
    layers = [layer for holder in holders if isinstance(holder, nn.ModuleDict) for layer in holder.values()]
    return [layer for layer in layers if isinstance(layer, nn.Dropout) and layer.p > 0]


@contextmanager
def active_dropout(dropouts: Sequence[nn.Dropout], *, seed: int, device: torch.device) -> Iterator[None]:
    """Within, these layers drop with masks from `seed`; torch's generators are restored afterwards."""
    if not dropouts:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for layer in dropouts:
            layer.train()
        try:
            yield
        finally:
            for layer in dropouts:
                layer.eval()
