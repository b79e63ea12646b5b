"""Rotary frequencies that do not depend on what else is in a batch.

Models with LongRoPE (Phi-3 and Phi-4 with long contexts) have two sets of frequencies. transformers chooses one set for
a whole forward, by its largest position: a short sequence would be computed differently beside a long one, and keys in
a KV cache differently from the queries that follow. As in vLLM, the set is chosen once, by the longest context.
"""

from __future__ import annotations

import torch
from torch import nn

FIXED = "fixed"
"""Value of `rope_type` that no update of transformers applies to."""


@torch.no_grad()
def fix_rotary_frequencies(*models: nn.Module | None, max_model_len: int) -> None:
    """Keep the frequencies of a sequence of `max_model_len` tokens for sequences of every length; idempotent."""
    for module in [module for model in models if model is not None for module in model.modules()]:
        rope_type = getattr(module, "rope_type", None)
        of_layer_type = rope_type if isinstance(rope_type, dict) else {None: rope_type}
        changing = [name for name, value in of_layer_type.items() if depends_on_length(value)]
        if not changing:
            continue
        last = torch.full((1, 1), max_model_len - 1, device=next(module.buffers()).device)
        for layer_type in changing:
            module(last.float(), last, **({} if layer_type is None else {"layer_type": layer_type}))
        fixed = {name: FIXED if name in changing else value for name, value in of_layer_type.items()}
        module.rope_type = fixed if isinstance(rope_type, dict) else FIXED  # type: ignore[assignment]


def depends_on_length(rope_type: object) -> bool:
    """Whether transformers chooses the frequencies by the largest position of a forward."""
    return isinstance(rope_type, str) and (rope_type == "longrope" or "dynamic" in rope_type)
