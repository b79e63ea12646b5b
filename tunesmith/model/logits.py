"""From hidden states to logits, without the model's own forward.

`run_body` gives hidden states of every token; logits are made here for the few positions that need them. What an
architecture does to its logits after the head is read from its config. `verify_model` compares the two ways once, so
that an architecture we would get wrong is refused when it is loaded.

Axes: N positions, C hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tunesmith.errors import ModelError
from tunesmith.model.attention import CausalPlan, get_layer_index, run_body

SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}


def compute_logits(model: PreTrainedModel, hidden_NC: Tensor) -> Tensor:
    """Logits [N, V] in the model's own type, scaled and capped as the architecture does."""
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{type(model).__name__} has no language-model head; load it as a causal language model")
    config = model.config.get_text_config()
    logits_NV = head(hidden_NC)
    if scale := getattr(config, "logit_scale", None):
        logits_NV = logits_NV * scale
    if scale := getattr(config, "lm_head_multiplier", None):
        logits_NV = logits_NV * scale
    if divisor := getattr(config, "logits_scaling", None):
        logits_NV = logits_NV / divisor
    if cap := getattr(config, "final_logit_softcapping", None):
        logits_NV = torch.tanh(logits_NV / cap) * cap
    return logits_NV


class _WitnessPlan(CausalPlan):
    """Remembers which layers attended, and with which sliding window."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        super().__init__(lengths, device)
        self.window_of_layer: dict[int, int | None] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        self.window_of_layer[get_layer_index(module)] = kwargs["sliding_window"]
        return super().attend(module, query, key, value, **kwargs)


@torch.no_grad()
def verify_model(model: PreTrainedModel) -> None:
    """Raise ModelError unless planned attention and our head reproduce the model's own logits on two short rows."""
    config = model.config.get_text_config()
    if unknown := set(getattr(config, "layer_types", None) or ()) - SUPPORTED_LAYER_TYPES:
        raise ModelError(f"{type(model).__name__} has layers of type {', '.join(sorted(unknown))}: not supported")
    ids = torch.arange(1, 8, device=model.device) * 7 % config.vocab_size
    rows = [ids[:3], ids[3:]]
    positions = torch.cat([torch.arange(len(row), device=model.device) for row in rows])
    plan = _WitnessPlan([len(row) for row in rows], model.device)
    is_training = model.training
    model.eval()
    ours = compute_logits(model, run_body(model, ids[None], positions[None], plan)[0]).float()
    theirs = torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in rows]).float()
    model.train(is_training)
    _check_windows(model, plan.window_of_layer)
    tolerance = 1e-3 if model.dtype == torch.float32 else 5e-2
    error = ((ours - theirs).norm() / theirs.norm().clamp_min(1e-6)).item()
    if not error < tolerance:
        raise ModelError(
            f"{type(model).__name__}: logits made from hidden states differ from the model's own by {error:.1e} "
            f"(at most {tolerance:.0e}); this architecture is not supported"
        )


def _check_windows(model: PreTrainedModel, window_of_layer: dict[int, int | None]) -> None:
    """Every layer must attend through the plan, and name its window when its type says that it slides."""
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    for layer, layer_type in enumerate(layer_types):
        if layer not in window_of_layer:
            raise ModelError(f"{type(model).__name__}: layer {layer} does not attend through the attention interface")
        if layer_type == "sliding_attention" and window_of_layer[layer] is None:
            raise ModelError(f"{type(model).__name__}: layer {layer} slides but does not tell its window")
