"""Checks of a configuration and a class for architectures that sampler and trainer compute correctly.

`check_architecture` refuses what is known before weights are read; `verify_model` measures the rest on the loaded
model. Every refusal is built by `refuse_architecture`.
"""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from tunesmith.errors import ModelError

LAYER_TYPES = ("full_attention", "sliding_attention")
UNIFORM = ("head_dim", "sliding_window", "num_attention_heads", "num_key_value_heads", "hidden_size")
"""What KV cache and attention plans take from the configuration for all layers at once."""
SUPPORTED = (
    "supported are text models of transformers in which every layer is of type full_attention or sliding_attention "
    "and all have heads of one size, such as Llama, Qwen2, Qwen2.5, Qwen3, Qwen3-MoE, Mistral, Gemma 3 and "
    "Phi-3"
)


def refuse_architecture(config: PretrainedConfig, reason: str) -> ModelError:
    """The error for a model of a type that cannot be sampled or trained."""
    text = config.get_text_config()
    types = ", ".join(dict.fromkeys(getattr(text, "layer_types", None) or ()))
    layers = f" with layers of type {types}" if types else ""
    return ModelError(f"models of type {text.model_type!r}{layers} are not supported: {reason}; {SUPPORTED}")


def check_layers(config: PretrainedConfig) -> None:
    """Refuse layers that do not attend, or that have keys and windows of different sizes."""
    text = config.get_text_config()
    if unknown := set(getattr(text, "layer_types", None) or ()) - set(LAYER_TYPES):
        raise refuse_architecture(text, f"layers of type {', '.join(sorted(unknown))} are not implemented")
    if getattr(text, "is_heterogeneous", False):
        varying = [name for name in UNIFORM if len({getattr(each, name, None) for each in text.per_layer_config}) > 1]
        if varying:
            raise refuse_architecture(text, f"its layers differ in {', '.join(varying)}")


def check_architecture(config: PretrainedConfig) -> None:
    """Refuse a configuration whose layers or modeling code plan attention does not support."""
    check_layers(config)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is not None:
        check_attention_interface(config, model_class)
    elif not getattr(config, "auto_map", None):  # code of the model's own is checked once it is loaded
        raise refuse_architecture(config, "transformers has no causal language model for it")


def check_attention_interface(config: PretrainedConfig, model_class: Any) -> None:
    """Refuse modeling code that does not use transformers' attention interface."""
    if not (model_class._supports_attention_backend and model_class._supports_sdpa):
        raise refuse_architecture(config, f"{model_class.__name__} does not use transformers' attention interface")
