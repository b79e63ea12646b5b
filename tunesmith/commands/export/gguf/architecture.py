"""Architecture metadata of a GGUF file, derived from the Hugging Face config alone.

Supports Llama (also SmolLM and SmolLM2), SmolLM3, Qwen2, Qwen2.5 and dense Qwen3. Any setting that llama.cpp computes
differently from the modeling code is refused before weights are read, because a file that loads and answers wrongly is
worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tunesmith.errors import ModelError

FieldValue = int | float | str
NAMES: Mapping[str, str] = {"llama": "llama", "smollm3": "smollm3", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Name of the architecture in GGUF by `model_type` of transformers."""
ROTATED_IN_PAIRS = {"llama", "smollm3"}
"""Architectures for which llama.cpp applies rotary embeddings to adjacent pairs, and transformers to halves."""
SMOLLM3_INTERVAL = 4
"""llama.cpp hard-codes SmolLM3: every fourth layer has no rotary embedding."""
YARN_DEFAULTS: Mapping[str, float] = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""Defaults of llama.cpp for YaRN parameters (Peng et al., 2023) that a file does not set."""
IGNORED_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """Metadata fields of the model in a GGUF file, and the layout of its tensors."""

    name: str
    num_layers: int
    fields: Mapping[str, FieldValue]
    """Keys without the architecture prefix; floats are written as float32, integers as uint32."""
    rotated_heads: Mapping[str, int]
    """Numbers of heads of Q and K, whose rows are reordered into adjacent pairs for llama.cpp; empty: they are not."""
    rope_factors: tuple[float, ...] | None
    """Divisor of each rotary frequency (Llama 3.1 scaling); None without that scaling."""


def describe_architecture(config: PretrainedConfig) -> GgufArchitecture:
    """Metadata of the model; raises ModelError for an architecture or a setting that cannot be written."""
    model_type = config.model_type
    if model_type not in NAMES:
        raise ModelError(
            f"the architecture {model_type!r} cannot be written as GGUF; supported: {', '.join(NAMES)} "
            "(SmolLM and SmolLM2 are llama). Leave gguf out of the formats"
        )
    check_variant(config)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fields: dict[str, FieldValue] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads["attn_q"],
        "attention.head_count_kv": heads["attn_k"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    scaling, factors = describe_rope(config, head_dim=head_dim)
    return GgufArchitecture(
        name=NAMES[model_type],
        num_layers=config.num_hidden_layers,
        fields=fields | scaling,
        rotated_heads=heads if model_type in ROTATED_IN_PAIRS else {},
        rope_factors=factors,
    )


def check_variant(config: PretrainedConfig) -> None:
    """Raise ModelError for settings that llama.cpp does not implement for this architecture."""
    settings: dict[str, bool] = {
        f"hidden_act={config.hidden_act!r}": config.hidden_act != "silu",
        "sliding-window attention": any(
            each != "full_attention" for each in getattr(config, "layer_types", None) or []
        ),
        "attention_bias": config.model_type in {"qwen3", "smollm3"} and bool(config.attention_bias),
        "mlp_bias": config.model_type == "smollm3" and bool(config.mlp_bias),
        "layers without rotary embedding other than every fourth": has_other_rope_layers(config),
        "partial_rotary_factor": config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0,
    }
    refused = [name for name, is_refused in settings.items() if is_refused]
    if refused:
        raise ModelError(
            f"this {config.model_type} model has {', '.join(refused)}, which cannot be written as GGUF; "
            "remove gguf from formats"
        )


def has_other_rope_layers(config: PretrainedConfig) -> bool:
    if config.model_type != "smollm3":
        return False
    expected = [int((layer + 1) % SMOLLM3_INTERVAL != 0) for layer in range(config.num_hidden_layers)]
    return list(config.no_rope_layers) != expected


def describe_rope(config: PretrainedConfig, *, head_dim: int) -> tuple[dict[str, FieldValue], tuple[float, ...] | None]:
    """Metadata fields and frequency divisors of the model's rotary scaling."""
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return {}, None
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}, None
    if kind == "llama3" and config.model_type == "llama":
        return {}, compute_rope_factors(config, head_dim=head_dim)
    if kind == "yarn":
        return describe_yarn(rope, config), None
    raise ModelError(
        f"rotary scaling of type {kind!r} cannot be written as GGUF for {config.model_type}; supported: default, "
        "linear, yarn, and llama3 for llama. Leave gguf out of the formats"
    )


def compute_rope_factors(config: PretrainedConfig, *, head_dim: int) -> tuple[float, ...]:
    """Ratios of the unscaled frequencies theta^(-2i/d) to those of the modeling code."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / config.rope_parameters["rope_theta"] ** exponents
    return tuple((plain / scaled.float()).tolist())


def describe_yarn(rope: Mapping[str, Any], config: PretrainedConfig) -> dict[str, FieldValue]:
    """Metadata fields of YaRN; raises ModelError for parameters that llama.cpp fixes to another value."""
    known = {"factor", "original_max_position_embeddings"}
    others = {
        key: value
        for key, value in rope.items()
        if key not in IGNORED_ROPE_KEYS | known and value is not None and value != YARN_DEFAULTS.get(key)
    }
    if others:
        raise ModelError(f"YaRN with {others} cannot be written as GGUF; remove gguf from formats")
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": int(original),
    }
