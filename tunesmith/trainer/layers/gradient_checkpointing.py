"""Gradient checkpointing: layers save only their inputs and are recomputed in the backward pass.

On a GPU they also save the output of attention, unless numerics are exact. Its time grows with the square of a row's
length: it takes one to two times the memory of a layer's input, and most of a forward at 32k tokens is not repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tunesmith.errors import ConfigError


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Prepare the model; raise ConfigError if its config has dropout, which training mode would activate."""
    for name, value in model.config.get_text_config().to_dict().items():
        if ("dropout" in name or "pdrop" in name) and isinstance(value, float) and value > 0:
            raise ConfigError(
                f"the model's config has {name}={value}, which trainer.has_gradient_checkpointing would activate: "
                "set the dropout to 0, or turn checkpointing off"
            )
    options: dict[str, Any] = {"use_reentrant": False}
    if model.device.type == "cuda":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _choose_policy)
    if hasattr(model, "activation_checkpointing_enable"):  # its name in later versions of transformers
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(options)


def _choose_policy(_context: Any, operation: Any, *_arguments: Any, **_options: Any) -> CheckpointPolicy:
    is_attention = str(operation) == "tunesmith.tree_attention.default"
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def checkpointed_layers(model: PreTrainedModel) -> Iterator[None]:
    """Checkpoint layers in this context: transformers does so where the layer itself is in training mode."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
