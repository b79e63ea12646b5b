"""Gradient checkpointing: layers save only their inputs and are recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
    if hasattr(model, "activation_checkpointing_enable"):  # its name in later versions of transformers
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})


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
