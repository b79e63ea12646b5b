"""Adapters injected into a model, saved in PEFT's format, and merged: always the same function."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AfmoeConfig, AutoModelForCausalLM, GPT2Config, LagunaConfig, PhimoeConfig

from tiny_models import EXPERTS, GEMMA_SIZES, SIZES, build_tiny
from tunesmith.commands.stage import check_models
from tunesmith.config import AuxiliaryModelSection, LoraSection, ModelSection
from tunesmith.errors import ModelError, StorageError
from tunesmith.model.adapters.adapter import disabled_adapter, has_adapter
from tunesmith.model.adapters.lora import add_adapter, measure_quantization_error
from tunesmith.model.checkpoint import estimate_checkpoint_bytes, load_checkpoint, save_checkpoint, save_model_files
from tunesmith.model.load import check_model, check_section, load_model, load_section_model, load_tokenizer
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer
from tunesmith.runs.policy import check_auxiliary
from tunesmith.runs.result import load_for_inference

CPU = torch.device("cpu")
IDS = torch.arange(5, 29)[None]


@pytest.fixture(scope="module")
def tokenizer():
    return build_pocket_tokenizer()


@pytest.fixture(scope="module")
def base(tokenizer, tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"), tokenizer)


def save_base(folder, tokenizer, *, seed=0, hidden_size=96):
    build_pocket_model(tokenizer, seed=seed, hidden_size=hidden_size, num_layers=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load_with_adapter(path, *, dtype=torch.float32, **lora):
    return load_model(str(path), dtype=dtype, device=CPU, lora=LoraSection(**lora))


def randomize_adapter(model, *, seed=1):
    """Give the adapter nonzero values, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.1)
    return model


@pytest.fixture(scope="module")
def adapter(base, tokenizer, tmp_path_factory):
    """A trained adapter on disk."""
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)  # PEFT draws the first values
    save_model_files(folder, randomize_adapter(load_with_adapter(base, r=4)), tokenizer)
    return folder


@torch.no_grad()
def compute_logits(model):
    return model(IDS).logits


def test_a_new_adapter_changes_no_output_and_only_it_takes_gradients(base):
    model = load_with_adapter(base)
    assert torch.equal(compute_logits(model), compute_logits(load_model(str(base), dtype=torch.float32, device=CPU)))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 2 * 4
    assert all(".self_attn." in name and ".lora_" in name for name in trained)
    assert sum(parameter.numel() for parameter in trained.values()) == 2 * 16 * (4 * 96 + 2 * 96 + 2 * 32)


def test_the_seed_fixes_a_new_adapter(base):
    one, two, other = (dict(load_with_adapter(base, seed=seed).named_parameters()) for seed in (3, 3, 4))
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert torch.equal(one[name], two[name])
    assert not torch.equal(one[name], other[name])


def test_targets_are_attention_all_linear_layers_or_names(base):
    def targets(value):
        names = [n for n, p in load_with_adapter(base, target_modules=value).named_parameters() if p.requires_grad]
        return {name.split(".")[-4] for name in names}

    attention, mlp = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    assert targets("attention") == attention
    assert targets("all-linear") == attention | mlp
    assert targets(("v_proj", "up_proj")) == {"v_proj", "up_proj"}
    assert targets(("self_attn.v_proj",)) == {"v_proj"}
    for names, unknown in ((("w1",), "w1"), (("v_proj", "up"), "up"), (("v_proj", "self_attn"), "self_attn")):
        with pytest.raises(ModelError, match=f"model.lora.target_modules: .* no linear layer '{unknown}'; .*v_proj"):
            targets(names)


def test_saved_files_load_in_peft(base, adapter):
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(plain, adapter)
    expected = compute_logits(randomize_adapter(load_with_adapter(base, r=4)))
    torch.testing.assert_close(compute_logits(theirs.eval()), expected, atol=1e-6, rtol=1e-6)
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 32, "CAUSAL_LM")
    assert config["base_model_name_or_path"] == str(base)


def test_an_adapter_saved_by_peft_can_be_merged_or_trained_further(base, tmp_path):
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = get_peft_model(plain, LoraConfig(r=2, lora_alpha=3, target_modules=["up_proj", "v_proj"])).eval()
    randomize_adapter(theirs).save_pretrained(tmp_path)
    expected = compute_logits(theirs)
    merged = load_model(str(tmp_path), dtype=torch.float32, device=CPU)
    torch.testing.assert_close(compute_logits(merged), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(compute_logits(load_with_adapter(tmp_path)), expected, atol=1e-6, rtol=1e-6)


def test_a_merged_adapter_gives_the_same_outputs_and_a_plain_model(base, adapter, tokenizer, tmp_path):
    expected = compute_logits(randomize_adapter(load_with_adapter(base, r=4)))
    merged = load_model(str(adapter), dtype=torch.float32, device=CPU)
    torch.testing.assert_close(compute_logits(merged), expected, atol=1e-5, rtol=1e-5)
    assert not has_adapter(merged)
    assert all(parameter.requires_grad for parameter in merged.parameters())
    save_model_files(tmp_path, merged, tokenizer)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(compute_logits(plain), compute_logits(merged))


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens", "q_proj"]])
def test_merging_into_a_tied_head_or_embedding_changes_that_one_alone(base, tokenizer, tmp_path, targets):
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = get_peft_model(plain, LoraConfig(r=2, lora_alpha=3, target_modules=targets)).eval()
    randomize_adapter(theirs).save_pretrained(tmp_path / "adapter")
    merged = load_model(str(tmp_path / "adapter"), dtype=torch.float32, device=CPU, base_path=str(base))
    torch.testing.assert_close(compute_logits(merged), compute_logits(theirs), atol=1e-4, rtol=1e-4)
    save_model_files(tmp_path / "merged", merged, tokenizer)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(compute_logits(saved), compute_logits(merged))


@pytest.mark.filterwarnings("error::FutureWarning")
def test_an_adapter_is_loaded_without_warnings_of_libraries(adapter):
    """PEFT reads an attribute under a name that transformers deprecates; users saw the warning."""
    assert not has_adapter(load_model(str(adapter), dtype=torch.float32, device=CPU))
    assert has_adapter(load_for_inference(str(adapter))[0])


def test_merging_in_bfloat16_is_close(adapter):
    expected = compute_logits(load_model(str(adapter), dtype=torch.float32, device=CPU))
    merged = load_model(str(adapter), dtype=torch.bfloat16, device=CPU)
    assert merged.dtype == torch.bfloat16
    error = (compute_logits(merged).float() - expected).norm() / expected.norm()
    assert error < 0.03


def test_adapters_have_the_dtype_of_the_activations(adapter):
    model = load_with_adapter(adapter, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_with_its_adapter_disabled_the_model_is_the_base_bit_for_bit(base, adapter):
    model = load_with_adapter(adapter)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    before = compute_logits(model)
    with disabled_adapter(model):
        bare = compute_logits(model)
    assert torch.equal(bare, compute_logits(load_model(str(base), dtype=torch.float32, device=CPU)))
    assert not torch.equal(bare, before)
    assert torch.equal(compute_logits(model), before)
    assert trained == [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_a_checkpoint_holds_only_the_adapter_and_restores_bit_for_bit(base, tokenizer, tmp_path):
    model = randomize_adapter(load_with_adapter(base), seed=5)
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    expected = {name: parameter.clone() for name, parameter in model.named_parameters()}
    folder = tmp_path / "global_step_3"
    save_checkpoint(folder, model, tokenizer, trainer_state={"num_steps": 3}, run_state={})
    assert not (folder / "model.safetensors").exists()
    num_bytes = (folder / "adapter_model.safetensors").stat().st_size
    assert num_bytes < 4 * 2 * 16 * (4 * 96 + 2 * 96 + 2 * 32) + 5000
    assert estimate_checkpoint_bytes(model, {}) > num_bytes
    randomize_adapter(model, seed=6)
    assert load_checkpoint(folder, model).trainer_state == {"num_steps": 3}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name])
        assert parameter.data_ptr() == places[name]
    with pytest.raises(StorageError, match="does not hold the adapter of this model"):
        load_checkpoint(folder, load_with_adapter(base, r=3))


def test_an_adapter_uses_its_own_tokenizer_or_that_of_its_base(base, adapter, tmp_path):
    assert load_tokenizer(str(adapter)).chat_template == load_tokenizer(str(base)).chat_template
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes((adapter / name).read_bytes())
    assert load_tokenizer(str(tmp_path)).get_vocab() == load_tokenizer(str(base)).get_vocab()


def test_an_adapter_for_another_architecture_is_refused_before_weights(adapter, tokenizer, tmp_path):
    other = save_base(tmp_path, tokenizer, hidden_size=192)
    with pytest.raises(ModelError, match=r"for a base other than .*k_proj \(96 -> 32\), and this base has 192 -> 64"):
        check_model(str(adapter), max_model_len=16, base_path=str(other))


def test_an_adapter_for_other_weights_of_the_same_shape_is_refused(adapter, tokenizer, tmp_path):
    other = save_base(tmp_path, tokenizer, seed=1)
    with pytest.raises(ModelError, match="same layers but different weights"):
        check_model(str(adapter), max_model_len=16, base_path=str(other))


def test_a_moved_base_is_found_through_base_path(base, adapter, tmp_path):
    moved = tmp_path / "adapter"
    moved.mkdir()
    for path in adapter.iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    config = json.loads((adapter / "adapter_config.json").read_text())
    (moved / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "/gone/base"}))
    with pytest.raises(ModelError, match=r"base of the adapter .*no such folder; set model.base_path"):
        check_model(str(moved), max_model_len=16)
    (moved / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "nobody/no-base"}))
    with pytest.raises(ModelError, match=r"its base 'nobody/no-base' is not a local folder.*model.base_path"):
        check_model(str(moved), max_model_len=16)
    check_model(str(moved), max_model_len=16, base_path=str(base))
    model = load_model(str(moved), dtype=torch.float32, device=CPU, base_path=str(base))
    assert torch.equal(compute_logits(model), compute_logits(load_model(str(adapter), dtype=torch.float32, device=CPU)))
    with pytest.raises(ModelError, match="not an adapter folder"):
        check_model(str(base), max_model_len=16, base_path=str(base))
    section = ModelSection(path=str(moved), max_model_len=16, base_path=str(base))
    check_models(section, [str(moved), str(base)])  # the base of one model says nothing about another


def test_broken_adapters_are_one_sentence(base, adapter, tmp_path):
    config = json.loads((adapter / "adapter_config.json").read_text())
    for change, match in (
        ({"peft_type": "IA3"}, "of type IA3"),
        ({"base_model_name_or_path": None}, "does not name its base"),
        ({}, "no adapter_model.safetensors"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelError, match=match):
            check_model(str(tmp_path), max_model_len=16)
        with pytest.raises(ModelError, match=rf"^auxiliary_models\.judge\.path=.*{match}"):
            check_auxiliary("auxiliary_models.judge", AuxiliaryModelSection(path=str(tmp_path)))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"half")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(adapter)}))
    with pytest.raises(ModelError, match="itself an adapter"):
        check_model(str(tmp_path), max_model_len=16)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="cannot be read"):
        check_model(str(tmp_path), max_model_len=16)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="not a LoRA adapter.s config"):
        check_model(str(tmp_path), max_model_len=16)


def test_nf4_needs_bitsandbytes(base, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'tunesmith\[qlora\]'"):
        check_section(quantized_section(base))


def quantized_section(base):
    return ModelSection(path=str(base), max_model_len=64, device="cpu", lora=LoraSection(quantization="nf4"))


@pytest.mark.parametrize("hidden_size", [96, 192])
def test_nf4_is_accurate_or_refused(tokenizer, tmp_path, hidden_size):
    """On a CPU some releases of bitsandbytes misplace the scales of widths that are not a multiple of 64."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    section = quantized_section(save_base(tmp_path, tokenizer, hidden_size=hidden_size))
    if not measure_quantization_error(hidden_size, CPU) < 0.15:
        with pytest.raises(ModelError, match=f"% on weights of {hidden_size} columns on cpu"):
            check_section(section)
        return
    check_section(section)
    layer = load_section_model(section).model.layers[0].mlp.up_proj
    weight = load_model(section.path, dtype=torch.float32, device=CPU).model.layers[0].mlp.up_proj.weight.detach()
    restored = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    assert 0.05 < (restored - weight).norm() / weight.norm() < 0.12


def test_a_quantized_base_is_double_quantized_nf4_and_frozen(tokenizer, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    base = save_base(tmp_path, tokenizer, hidden_size=192)
    check_section(quantized_section(base))
    model = load_section_model(quantized_section(base))
    layer = model.model.layers[0].mlp.up_proj
    state = layer.weight.quant_state
    assert isinstance(layer, bitsandbytes.nn.Linear4bit)
    assert (state.quant_type, state.nested, state.dtype) == ("nf4", True, torch.float32)
    assert all(".lora_" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    before = compute_logits(model)
    with disabled_adapter(randomize_adapter(model)):
        assert torch.equal(compute_logits(model), before)
    assert not torch.allclose(compute_logits(model), before)


@pytest.mark.parametrize("targets", ["attention", "all-linear"])
@pytest.mark.parametrize("name", ["falcon_h1", "nemotron_h"])
def test_groups_of_targets_leave_out_what_peft_refuses_with_mamba(name, targets):
    model = copy.deepcopy(build_tiny(name)).requires_grad_(False)
    add_adapter(model, LoraSection(r=2, target_modules=targets), base="", dtype=torch.float32)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert any(".in_proj." in name for name in names) and any(".q_proj." in name for name in names)
    assert not any(".out_proj." in name for name in names)


MIXTURE = GEMMA_SIZES | EXPERTS | {"num_experts": 4, "num_local_experts": 4}
FAMILIES = {
    # the two names of its shared experts differ by a letter: PEFT dropped their adapters while it loaded them
    "laguna": (LagunaConfig(**MIXTURE, shared_expert_intermediate_size=8), "all-linear"),
    # PEFT takes the gate of its attention for that of its experts
    "afmoe": (AfmoeConfig(**MIXTURE, num_dense_layers=1, num_shared_experts=1), "attention"),
    # its router is a linear layer with several outputs
    "phimoe": (PhimoeConfig(**SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}), "all-linear"),
    # its layers have the weights of linear ones, transposed
    "gpt2": (GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4), ("attn.c_attn", "c_fc")),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_layers_that_peft_knows_otherwise_is_saved_whole(family, tokenizer, tmp_path):
    config, targets = copy.deepcopy(FAMILIES[family])
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config)
    for weight in plain.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    plain.save_pretrained(tmp_path / "base")
    model = randomize_adapter(load_with_adapter(tmp_path / "base", r=2, target_modules=targets))
    expected = compute_logits(model)
    save_model_files(tmp_path / "adapter", model, tokenizer)
    check_model(str(tmp_path / "adapter"), max_model_len=16)
    assert torch.equal(compute_logits(load_with_adapter(tmp_path / "adapter")), expected)
    merged = load_model(str(tmp_path / "adapter"), dtype=torch.float32, device=CPU)
    torch.testing.assert_close(compute_logits(merged), expected, atol=1e-4, rtol=1e-4)


def test_a_pattern_of_targets_is_named_whole(base, tmp_path):
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    get_peft_model(plain, LoraConfig(r=2, target_modules=r".*\.(q|v)_proj")).save_pretrained(tmp_path)
    section = ModelSection(path=str(tmp_path), base_path=str(base), lora=LoraSection(target_modules=("q_proj",)))
    with pytest.raises(ModelError, match=r"but the adapter .* has \['\.\*"):
        check_section(section)
    settings = json.loads((tmp_path / "adapter_config.json").read_text()) | {"target_modules": None}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"but the adapter .* has \[\]"):
        check_section(section)
