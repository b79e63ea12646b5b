"""Random models of a few thousand parameters, covering the variants of attention."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Iterator
from functools import cache

import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    GraniteSWAConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    NemotronHConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
)

from tunesmith.model.towers import find_auto_class

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
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
VISION = {
    "depth": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "intermediate_size": 24,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
ROPE_AXES = {"rope_type": "default", "rope_theta": 1e4}
GROUPED_EXPERTS = EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
LATENT_SIZES = SIZES | {"num_key_value_heads": 4, "first_k_dense_replace": 1} | GROUPED_EXPERTS | LATENT
"""Keys of 12 numbers a head."""

MIXTURES = ("qwen3_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "gpt_oss", "gemma4")
"""Configs with experts."""


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
        "qwen3_moe": Qwen3MoeConfig(**GEMMA_SIZES, **EXPERTS, num_experts=8, norm_topk_prob=True),
        "glm4_moe": Glm4MoeConfig(**GEMMA_SIZES, **GROUPED_EXPERTS, first_k_dense_replace=1),
        "glm4_moe_lite": Glm4MoeLiteConfig(**LATENT_SIZES, v_head_dim=16),
        "deepseek_v3": DeepseekV3Config(**LATENT_SIZES, v_head_dim=6, num_local_experts=8),
        "gpt_oss": GptOssConfig(
            **GEMMA_SIZES, sliding_window=5, num_local_experts=4, num_experts_per_tok=2, swiglu_limit=1.0
        ),
        "granite_swa": GraniteSWAConfig(
            **SIZES, sliding_window=5, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
        ),
        "gemma4": Gemma4TextConfig(
            **GEMMA_SIZES,
            sliding_window=5,
            final_logit_softcapping=3.0,
            num_kv_shared_layers=1,
            global_head_dim=24,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=97,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=16,
        ),
        "qwen2_5_vl": Qwen2_5_VLConfig(
            text_config=SIZES | {"rope_parameters": ROPE_AXES | {"mrope_section": [1, 1, 2]}},
            vision_config=VISION | {"fullatt_block_indexes": [1]},
        ),
        "qwen3_vl": Qwen3VLConfig(
            text_config=GEMMA_SIZES | {"rope_parameters": ROPE_AXES | {"mrope_section": [4, 2, 2]}},
            vision_config=VISION | {"deepstack_visual_indexes": [0, 1]},
        ),
    }
)

LINEAR = GEMMA_SIZES | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_expand": 2}
SHARED_EXPERTS = EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 8}
RECURRENT = FreshConfigs(
    {
        "lfm2": Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv"], block_multiple_of=8),
        "qwen3_5": Qwen3_5TextConfig(**LINEAR),
        "qwen3_next": Qwen3NextConfig(**LINEAR, mlp_only_layers=[0, 1, 2]),
        "qwen3_5_moe": Qwen3_5MoeTextConfig(**LINEAR, **SHARED_EXPERTS),
        "granitemoehybrid": GraniteMoeHybridConfig(
            **SIZES,
            **MAMBA,
            layer_types=LINEAR["layer_types"],
            shared_intermediate_size=24,
            num_local_experts=4,
            num_experts_per_tok=2,
            residual_multiplier=0.7,
            logits_scaling=2.0,
        ),
        "falcon_h1": FalconH1Config(
            **SIZES,
            **MAMBA,
            mamba_d_ssm=64,
            ssm_multipliers=[0.5, 1.5, 0.7, 0.8, 1.2],
            ssm_in_multiplier=1.3,
            lm_head_multiplier=0.5,
        ),
        "nemotron_h": NemotronHConfig(
            **SIZES | {"num_hidden_layers": 4},
            layer_types=["linear_attention", "moe", "full_attention", "mlp"],
            mamba_num_heads=8,
            mamba_head_dim=8,
            ssm_state_size=6,
            n_groups=2,
            conv_kernel=4,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            moe_shared_expert_intermediate_size=16,
        ),
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
        config = get_config(name)
        model = find_auto_class(config).from_config(config, attn_implementation="eager").eval()
        for weight in iter_weights(model):
            nn.init.normal_(weight, std=0.3)
    return model


def iter_weights(model: PreTrainedModel) -> Iterator[torch.Tensor]:
    """Parameters, and the biases that choose experts, which are buffers."""
    yield from model.parameters()
    yield from (buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
