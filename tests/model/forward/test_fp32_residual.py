"""Residuals in float32: what they bring, what they leave as it is, and which models cannot have them."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, Olmo2Config, Qwen3Config

from tiny_models import CONFIGS, GEMMA_SIZES, SIZES, build_tiny
from trainable_models import build_deep, read_residual_types
from tunesmith.config import LoraSection, ModelSection
from tunesmith.errors import ModelError
from tunesmith.model.forward.fp32_residual import check_residuals, find_norms, widen_residuals
from tunesmith.model.load import check_types, load_model

CPU = torch.device("cpu")
IDS = torch.arange(60)[None] * 7 % 97


@torch.no_grad()
def compute_logprobs(model) -> torch.Tensor:
    """With logits in float32, as on a GPU."""
    hidden = model.get_decoder()(input_ids=IDS).last_hidden_state
    return (hidden.float() @ model.get_output_embeddings().weight.float().T).log_softmax(-1)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma", "mistral", "phi3"])
def test_a_model_of_16_bits_comes_closer_to_its_weights_in_float32(name):
    errors = torch.zeros(2)
    for seed in range(3):
        narrow, wide = (build_deep(name, is_wide=is_wide, seed=seed) for is_wide in (False, True))
        exact = compute_logprobs(copy.deepcopy(narrow).float())
        errors += torch.stack([(compute_logprobs(model) - exact).norm() for model in (narrow, wide)])
    assert errors[1] < 0.85 * errors[0]
    assert wide.get_decoder()(input_ids=IDS).last_hidden_state.dtype == torch.bfloat16
    assert read_residual_types(narrow.get_decoder()) == {torch.bfloat16}
    assert read_residual_types(wide.get_decoder()) == {torch.float32}


def test_norms_of_queries_and_keys_are_left_alone_even_where_a_head_is_as_large_as_the_model():
    model = AutoModelForCausalLM.from_config(Qwen3Config(**GEMMA_SIZES | {"head_dim": 32}), dtype=torch.bfloat16)
    decoder = model.get_decoder()
    expected = [decoder.norm]
    for layer in decoder.layers:
        assert layer.self_attn.q_norm.weight.shape == decoder.norm.weight.shape
        expected += [layer.input_layernorm, layer.post_attention_layernorm]
    assert find_norms(model) == expected


def test_weights_and_files_are_the_same(tmp_path):
    narrow, wide = build_deep("qwen3"), build_deep("qwen3", is_wide=True)
    for name, model in (("narrow", narrow), ("wide", wide)):
        model.save_pretrained(tmp_path / name)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "narrow" / file).read_bytes() == (tmp_path / "wide" / file).read_bytes()
    found = {
        is_wide: load_model(str(tmp_path / "wide"), dtype=torch.bfloat16, device=CPU, has_wide_residuals=is_wide)
        for is_wide in (False, True)
    }
    torch.testing.assert_close(compute_logprobs(found[False]), compute_logprobs(narrow), rtol=0, atol=0)
    torch.testing.assert_close(compute_logprobs(found[True]), compute_logprobs(wide), rtol=0, atol=0)


def test_a_live_adapter_reads_and_adds_in_the_type_of_the_weights(tmp_path):
    build_deep("llama").save_pretrained(tmp_path)
    lora = LoraSection(target_modules="all-linear")
    model = load_model(str(tmp_path), dtype=torch.bfloat16, device=CPU, lora=lora, has_wide_residuals=True)
    torch.testing.assert_close(compute_logprobs(model), compute_logprobs(build_deep("llama", is_wide=True)))
    assert read_residual_types(model.get_decoder()) == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_of_wider_weights_stays_as_it_is(dtype):
    model = copy.deepcopy(build_tiny("llama")).to(dtype)
    before = model(input_ids=IDS).logits
    widen_residuals(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    torch.testing.assert_close(model(input_ids=IDS).logits, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "config", [GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=2), Olmo2Config(**SIZES)], ids=["gpt2", "olmo2"]
)
def test_other_norms_and_norms_after_layers_are_refused_before_weights_are_read(config):
    section = ModelSection(path="unread", device="cpu", dtype="bfloat16", residual_dtype="float32")
    with pytest.raises(ModelError, match=r"model\.residual_dtype=float32 is not supported for (GPT2|Olmo2)"):
        check_types(section, config)
    check_types(section.model_copy(update={"dtype": "float32"}), config)
    check_types(section.model_copy(update={"residual_dtype": "model"}), config)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_all_families_of_the_tests_can_have_them(name):
    check_residuals(CONFIGS[name])


def test_layers_that_narrow_or_leak_the_residuals_are_refused():
    narrowing, leaking = build_deep("llama"), build_deep("llama")
    narrowing.model.layers[-1].register_forward_hook(lambda layer, inputs, output: output.bfloat16())
    with pytest.raises(ModelError, match=r"model\.residual_dtype=float32 .* type of its embeddings"):
        widen_residuals(narrowing)
    leaking.model.layers[3].mlp.register_forward_pre_hook(lambda mlp, inputs: inputs[0].float())
    with pytest.raises(ModelError, match=r"model\.residual_dtype=float32 .* dtype"):
        widen_residuals(leaking)
