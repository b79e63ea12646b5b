"""Gradient checkpointing: layers keep their inputs only, and are computed again in the backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tunesmith.errors import ConfigError


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Prepare the model; raise ConfigError when its layers could then drop at random what the sampler keeps."""
    for name, value in model.config.get_text_config().to_dict().items():
        if ("dropout" in name or "pdrop" in name) and isinstance(value, float) and value > 0:
            raise ConfigError(
                f"the model's config has {name}={value}, which trainer.has_gradient_checkpointing would switch on: "
                "set one of them to 0"
            )
    if hasattr(model, "activation_checkpointing_enable"):  # the name that later transformers know it by
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})


@contextmanager
def checkpointed_layers(model: PreTrainedModel) -> Iterator[None]:
    """Transformers checkpoints a layer only in training mode: put the layers, not what is in them, in that mode."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
