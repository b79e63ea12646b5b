"""Random models of a few thousand parameters, covering the variants of attention."""

from __future__ import annotations

import copy
from collections import UserDict
from functools import cache

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GEMMA_SIZES = SIZES | {"head_dim": 16}
SLIDING = {"sliding_window": 5, "query_pre_attn_scalar": 16}


class FreshConfigs(UserDict[str, PreTrainedConfig]):
    """Configs by name. Each access gives a copy: a model keeps its config, and changes it."""

    def __getitem__(self, name: str) -> PreTrainedConfig:
        return copy.deepcopy(super().__getitem__(name))


CONFIGS = FreshConfigs(
    {
        "llama": LlamaConfig(**SIZES),
        "qwen2": Qwen2Config(**SIZES),
        "qwen3": Qwen3Config(**GEMMA_SIZES),
        "gemma": GemmaConfig(**GEMMA_SIZES),
        "gemma2": Gemma2Config(**GEMMA_SIZES, **SLIDING, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
        "gemma3": Gemma3TextConfig(
            **GEMMA_SIZES, **SLIDING, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
        ),
        "mistral": MistralConfig(**SIZES, sliding_window=5),
        "phi3": Phi3Config(**SIZES),
    }
)

LINEAR = GEMMA_SIZES | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 8,
}
RECURRENT = FreshConfigs(
    {
        "lfm2": Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv"], block_multiple_of=8),
        "qwen3_5": Qwen3_5TextConfig(**LINEAR),
        "qwen3_next": Qwen3NextConfig(**LINEAR, mlp_only_layers=[0, 1, 2]),
        "qwen3_5_moe": Qwen3_5MoeTextConfig(**LINEAR, **EXPERTS),
    }
)
"""Models with recurrent layers."""


def get_config(name: str) -> PreTrainedConfig:
    return RECURRENT[name] if name in RECURRENT else CONFIGS[name]


@cache
def build_tiny(name: str) -> PreTrainedModel:
    """A shared model of the family, not to be modified; its weights are large, so that no two logits are close."""
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(get_config(name), attn_implementation="eager").eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    return model
