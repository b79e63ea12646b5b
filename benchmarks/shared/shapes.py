"""Models of real sizes with random weights, for speed measurements without downloads."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tunesmith.model.forward.recurrence import is_recurrent

SHAPES: dict[str, PretrainedConfig] = {
    "smollm2-135m": LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, tie_word_embeddings=True, max_position_embeddings=8192,
    ),
    "qwen3-0.6b": Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, max_position_embeddings=32768,
    ),
    "qwen2.5-1.5b": Qwen2Config(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=32768,
    ),
    "qwen2.5-7b": Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, max_position_embeddings=32768,
    ),
    "qwen2.5-14b": Qwen2Config(
        vocab_size=152064, hidden_size=5120, intermediate_size=13824, num_hidden_layers=48, num_attention_heads=40,
        num_key_value_heads=8, max_position_embeddings=32768,
    ),
    "qwen2.5-32b": Qwen2Config(
        vocab_size=152064, hidden_size=5120, intermediate_size=27648, num_hidden_layers=64, num_attention_heads=40,
        num_key_value_heads=8, max_position_embeddings=32768,
    ),
    "qwen3-30b-a3b": Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, max_position_embeddings=32768,
    ),
    "qwen3.5-0.8b": Qwen3_5TextConfig(
        vocab_size=248320, hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=8,
        num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16,
        tie_word_embeddings=True, max_position_embeddings=32768,
    ),
    "qwen3.5-9b": Qwen3_5TextConfig(
        vocab_size=248320, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32, num_attention_heads=16,
        num_key_value_heads=4, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32,
        max_position_embeddings=32768,
    ),
}  # fmt: skip


def count_parameters(shape: str, num_layers: int | None = None) -> int:
    """Parameters of a decoder of this shape, or of one with another number of layers, without building it."""
    config = SHAPES[shape]
    return count_multiplied(shape, num_layers) + (
        0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    )


def count_multiplied(shape: str, num_layers: int | None = None) -> int:
    """Parameters that each token is multiplied with: those of the layers and of the head."""
    config = SHAPES[shape]
    has_experts = "num_experts" in config.to_dict()
    assert not is_recurrent(config) and not has_experts, f"{shape} has experts, or layers of two kinds"
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = config.hidden_size * head * 2 * (config.num_attention_heads + config.num_key_value_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    return (num_layers or config.num_hidden_layers) * layer + config.vocab_size * config.hidden_size


def build_random_model(shape: str, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Build a model of the shape; the weights are always the same."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(copy.deepcopy(SHAPES[shape]), dtype=dtype, attn_implementation="sdpa")
    return model.eval()


def save_random_model(shape: str, folder: Path, *, tokenizer: str, device: torch.device) -> None:
    """Save a bfloat16 model with the tokenizer of another model, whose ids must fit the vocabulary."""
    build_random_model(shape, dtype=torch.bfloat16, device=device).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
