"""Architecture metadata of GGUF files, and the configs that are refused."""

from __future__ import annotations

import math

import pytest
from transformers import GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config, SmolLM3Config

from exported_models import CONFIGS, LLAMA3_ROPE, SIZES
from tiny_models import CONFIGS as OTHER_CONFIGS
from tunesmith.commands.export.gguf.architecture import describe_architecture
from tunesmith.errors import ModelError


def test_llama_metadata_has_every_size():
    described = describe_architecture(CONFIGS["smollm"])
    assert described.name == "llama" and described.rotated_heads == {"attn_q": 4, "attn_k": 2}
    assert described.fields == {
        "vocab_size": 416, "context_length": 512, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16,
        "attention.value_length": 16, "attention.layer_norm_rms_epsilon": 1e-6, "rope.dimension_count": 16,
        "rope.freq_base": 10000.0,
    }  # fmt: skip


def test_the_head_size_may_exceed_the_hidden_size_per_head():
    fields = describe_architecture(CONFIGS["qwen3"]).fields
    assert fields["attention.key_length"] == fields["rope.dimension_count"] == 128
    assert not describe_architecture(CONFIGS["qwen3"]).rotated_heads


def compute_llama3_factor(wavelength: float) -> float:
    """Llama 3.1's rule: long wavelengths are scaled by 8, short ones kept, and interpolated in between."""
    turns = LLAMA3_ROPE["original_max_position_embeddings"] / wavelength
    if turns > 4:
        return 1.0
    if turns < 1:
        return 8.0
    weight = (turns - 1) / (4 - 1)
    return 1 / ((1 - weight) / 8 + weight)


def test_llama3_scaling_becomes_a_divisor_for_each_frequency():
    factors = describe_architecture(CONFIGS["llama"]).rope_factors
    wavelengths = [2 * math.pi * 10000 ** (2 * i / 32) for i in range(16)]
    assert factors == pytest.approx([compute_llama3_factor(wavelength) for wavelength in wavelengths], rel=1e-5)
    assert factors[0] == 1.0 and factors[-1] == pytest.approx(8.0) and any(1.01 < factor < 7.9 for factor in factors)


def test_linear_and_yarn_scaling_have_their_fields():
    assert describe_architecture(CONFIGS["llama-biased"]).fields["rope.scaling.type"] == "linear"
    fields = describe_architecture(CONFIGS["qwen2-yarn"]).fields
    assert fields["rope.scaling.type"] == "yarn" and fields["rope.scaling.factor"] == 4.0
    assert fields["rope.scaling.original_context_length"] == 128


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3", "mistral", "phi3"])
def test_other_architectures_are_refused_by_name(name):
    with pytest.raises(
        ModelError, match=r"cannot be written as GGUF; supported: llama, smollm3, qwen2, qwen3.*Leave gguf out"
    ):
        describe_architecture(OTHER_CONFIGS[name])


def test_a_model_without_rotary_positions_is_refused():
    with pytest.raises(ModelError, match="'gpt2' cannot be written"):
        describe_architecture(GPT2Config())


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (LlamaConfig(**SIZES, hidden_act="gelu"), "hidden_act='gelu'"),
        (Qwen2Config(**SIZES, use_sliding_window=True, max_window_layers=1), "sliding-window attention"),
        (Qwen3Config(**SIZES, attention_bias=True), "attention_bias"),
        (SmolLM3Config(**SIZES, mlp_bias=True), "mlp_bias"),
        (SmolLM3Config(**SIZES, no_rope_layer_interval=2), "layers without rotary embedding other than"),
        (
            LlamaConfig(**SIZES, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
            "partial_rotary_factor",
        ),
        (Qwen2Config(**SIZES, rope_parameters=LLAMA3_ROPE), "type 'llama3' cannot be written as GGUF for qwen2"),
        (
            LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "type 'dynamic'",
        ),
        (
            LlamaConfig(
                **SIZES,
                rope_parameters={
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "original_max_position_embeddings": 128,
                    "attention_factor": 0.5,
                },
            ),
            "YaRN with {'attention_factor': 0.5}",
        ),
    ],
)
def test_variants_that_llama_cpp_computes_differently_are_refused(config, named):
    with pytest.raises(ModelError, match="GGUF") as raised:
        describe_architecture(config)
    assert named in str(raised.value)
