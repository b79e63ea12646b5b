"""The float32 residual stream: accuracy, what it leaves unchanged, and which architectures are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, Olmo2Config, Qwen3Config

from tiny_models import CONFIGS, GEMMA_SIZES, SIZES, build_tiny
from trainable_models import build_deep, read_residual_types
from tunesmith.config import LoraSection, ModelSection
from tunesmith.errors import ModelError
from tunesmith.model.forward.fp32_residual import check_fp32_residual, find_norms, use_fp32_residual
from tunesmith.model.load import check_residual_dtype, load_model

CPU = torch.device("cpu")
IDS = torch.arange(60)[None] * 7 % 97


@torch.no_grad()
def compute_logprobs(model) -> torch.Tensor:
    """Logprobs from float32 logits, as on a GPU."""
    hidden = model.get_decoder()(input_ids=IDS).last_hidden_state
    return (hidden.float() @ model.get_output_embeddings().weight.float().T).log_softmax(-1)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma", "mistral", "phi3"])
def test_a_16_bit_model_comes_closer_to_its_float32_forward(name):
    errors = torch.zeros(2)
    for seed in range(3):
        narrow, wide = (build_deep(name, has_fp32_residual=flag, seed=seed) for flag in (False, True))
        exact = compute_logprobs(copy.deepcopy(narrow).float())
        errors += torch.stack([(compute_logprobs(model) - exact).norm() for model in (narrow, wide)])
    assert errors[1] < 0.85 * errors[0]
    assert wide.get_decoder()(input_ids=IDS).last_hidden_state.dtype == torch.bfloat16
    assert read_residual_types(narrow.get_decoder()) == {torch.bfloat16}
    assert read_residual_types(wide.get_decoder()) == {torch.float32}


def test_query_and_key_norms_are_left_alone_even_if_the_head_size_is_the_hidden_size():
    model = AutoModelForCausalLM.from_config(Qwen3Config(**GEMMA_SIZES | {"head_dim": 32}), dtype=torch.bfloat16)
    decoder = model.get_decoder()
    expected = [decoder.norm]
    for layer in decoder.layers:
        assert layer.self_attn.q_norm.weight.shape == decoder.norm.weight.shape
        expected += [layer.input_layernorm, layer.post_attention_layernorm]
    assert find_norms(model) == expected


def test_weights_and_saved_files_do_not_change(tmp_path):
    narrow, wide = build_deep("qwen3"), build_deep("qwen3", has_fp32_residual=True)
    for name, model in (("narrow", narrow), ("wide", wide)):
        model.save_pretrained(tmp_path / name)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "narrow" / file).read_bytes() == (tmp_path / "wide" / file).read_bytes()
    found = {
        flag: load_model(str(tmp_path / "wide"), dtype=torch.bfloat16, device=CPU, has_fp32_residual=flag)
        for flag in (False, True)
    }
    torch.testing.assert_close(compute_logprobs(found[False]), compute_logprobs(narrow), rtol=0, atol=0)
    torch.testing.assert_close(compute_logprobs(found[True]), compute_logprobs(wide), rtol=0, atol=0)


def test_an_adapter_computes_in_the_dtype_of_the_weights(tmp_path):
    build_deep("llama").save_pretrained(tmp_path)
    lora = LoraSection(target_modules="all-linear")
    model = load_model(str(tmp_path), dtype=torch.bfloat16, device=CPU, lora=lora, has_fp32_residual=True)
    torch.testing.assert_close(compute_logprobs(model), compute_logprobs(build_deep("llama", has_fp32_residual=True)))
    assert read_residual_types(model.get_decoder()) == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_with_float32_or_wider_weights_is_not_changed(dtype):
    model = copy.deepcopy(build_tiny("llama")).to(dtype)
    before = model(input_ids=IDS).logits
    use_fp32_residual(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    torch.testing.assert_close(model(input_ids=IDS).logits, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "config", [GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=2), Olmo2Config(**SIZES)], ids=["gpt2", "olmo2"]
)
def test_layer_norms_and_post_norm_layers_are_refused_before_weights_are_read(config):
    section = ModelSection(path="unread", device="cpu", dtype="bfloat16", residual_dtype="float32")
    with pytest.raises(ModelError, match=r"model\.residual_dtype=float32 is not supported for (GPT2|Olmo2)"):
        check_residual_dtype(section, config)
    check_residual_dtype(section.model_copy(update={"dtype": "float32"}), config)
    check_residual_dtype(section.model_copy(update={"residual_dtype": "model"}), config)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_all_tested_families_support_it(name):
    check_fp32_residual(CONFIGS[name])


def test_layers_that_cast_the_residual_stream_or_their_inputs_are_refused():
    narrowing, leaking = build_deep("llama"), build_deep("llama")
    narrowing.model.layers[-1].register_forward_hook(lambda layer, inputs, output: output.bfloat16())
    with pytest.raises(ModelError, match=r"model\.residual_dtype=float32 .* dtype of the embeddings"):
        use_fp32_residual(narrowing)
    leaking.model.layers[3].mlp.register_forward_pre_hook(lambda mlp, inputs: inputs[0].float())
    with pytest.raises(ModelError, match=r"model\.residual_dtype=float32 .* dtype"):
        use_fp32_residual(leaking)
