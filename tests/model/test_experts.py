"""Experts: transformers' numbers, adapters of all experts in PEFT's files, and counts of routed tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tiny_models import CONFIGS, build_tiny, iter_weights
from tunesmith.commands.export.run import run_export
from tunesmith.config import ExportSection, LoraSection
from tunesmith.errors import ModelError
from tunesmith.model.adapters.adapter import disabled_adapter
from tunesmith.model.adapters.lora import add_adapter
from tunesmith.model.checkpoint import load_checkpoint, save_checkpoint, save_model_files
from tunesmith.model.experts import find_expert_weights
from tunesmith.model.forward.attention import CausalPlan, use_plan_attention
from tunesmith.model.load import check_model, load_model
from tunesmith.model.pocket import build_pocket_tokenizer

CPU = torch.device("cpu")
NAMES = ["qwen3_moe", "glm4_moe"]
IDS = torch.arange(3, 40)[None]
WEIGHTS = ("experts.gate_up_proj", "experts.down_proj")


@pytest.fixture(scope="module", params=NAMES)
def folder(request, tmp_path_factory):
    place = tmp_path_factory.mktemp(request.param)
    tokenizer = build_pocket_tokenizer()
    config = CONFIGS[request.param]
    config.vocab_size = len(tokenizer)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    for weight in iter_weights(model):
        torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def load(path, *, dtype: torch.dtype = torch.float32, **lora) -> PreTrainedModel:
    return load_model(str(path), dtype=dtype, device=CPU, lora=LoraSection(**lora) if lora else None)


@torch.no_grad()
def randomize(model: PreTrainedModel) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.2)
    return model


@torch.no_grad()
def compute_logits(model) -> Tensor:
    return model(IDS).logits


@pytest.mark.parametrize("name", [*NAMES, "gpt_oss", "gemma4"])
def test_experts_compute_what_transformers_own_do(name):
    model = copy.deepcopy(build_tiny(name))
    model.set_experts_implementation("grouped_mm")
    expected = compute_logits(model)
    use_plan_attention(model)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(compute_logits(model), expected, atol=1e-6, rtol=1e-6)
    model.set_experts_implementation("eager")
    torch.testing.assert_close(compute_logits(model), expected, atol=1e-5, rtol=1e-5)


def test_an_adapter_of_experts_trains_as_the_adapted_weights_would(folder):
    """Gradients of the factors by the chain rule from those of whole weights, with every expert computed by itself."""
    rank, scaling = 3, 32 / 3
    model = randomize(load(folder, dtype=torch.float64, r=rank, target_modules=WEIGHTS))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(".experts." in name for name in trained)
    model(IDS).logits.square().sum().backward()
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    factors = {name.replace(".base_layer", ""): each for name, each in read_adapters(model).items()}
    pairs = {}
    for name in find_expert_weights(dense):
        weight = dense.get_parameter(name)
        down, up = factors[name]
        down_ERC = down.detach().view(len(weight), rank, -1)
        up_ORE = up.detach().view(-1, rank, len(weight))
        with torch.no_grad():
            weight += scaling * torch.einsum("ore,erc->eoc", up_ORE, down_ERC)
        pairs[name] = (weight, down_ERC, up_ORE)
    logits = dense(IDS).logits
    torch.testing.assert_close(logits.detach(), compute_logits(model), rtol=1e-6, atol=1e-6)
    logits.square().sum().backward()
    for name, (weight, down_ERC, up_ORE) in pairs.items():
        down, up = factors[name]
        expected_down = scaling * torch.einsum("eoc,ore->erc", weight.grad, up_ORE)
        expected_up = scaling * torch.einsum("eoc,erc->ore", weight.grad, down_ERC)
        torch.testing.assert_close(down.grad.view_as(expected_down), expected_down, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(up.grad.view_as(expected_up), expected_up, rtol=1e-6, atol=1e-6)


def read_adapters(model: PreTrainedModel) -> dict[str, tuple[Tensor, Tensor]]:
    """Both factors by the name of the adapted weight."""
    adapters = {name: each for name, each in model.named_modules() if hasattr(each, "parameter_name")}
    return {
        f"{name}.{each.parameter_name}": (each.lora_A["default"].weight, each.lora_B["default"].weight)
        for name, each in adapters.items()
    }


def test_an_adapter_of_experts_is_saved_merged_and_disabled(folder, tmp_path):
    targets = ("q_proj", *WEIGHTS)
    model = randomize(load(folder, r=4, target_modules=targets))
    expected, plain = compute_logits(model), compute_logits(load(folder))
    assert (expected - plain).abs().max() > 0.1
    with disabled_adapter(model):
        assert torch.equal(compute_logits(model), plain)
    assert torch.equal(compute_logits(model), expected)
    tokenizer = build_pocket_tokenizer()
    save_model_files(tmp_path / "adapter", model, tokenizer)
    check_model(str(tmp_path / "adapter"), max_model_len=64)
    save_checkpoint(tmp_path / "global_step_1", model, tokenizer, trainer_state={}, run_state={})
    restored = load(folder, r=4, target_modules=targets)
    load_checkpoint(tmp_path / "global_step_1", restored)
    assert torch.equal(compute_logits(restored), expected)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter")
    torch.testing.assert_close(compute_logits(theirs.eval()), expected, atol=1e-4, rtol=1e-4)
    again = load(tmp_path / "adapter", r=4, target_modules=targets)
    assert torch.equal(compute_logits(again), expected)
    report = run_export(ExportSection(path=str(tmp_path / "adapter")), out_dir=tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(report.hf)
    torch.testing.assert_close(compute_logits(merged), expected, atol=1e-4, rtol=1e-4)


def test_all_weights_are_exported_with_one_tensor_per_expert_and_the_bias_that_chooses_experts(folder, tmp_path):
    model = randomize(load(folder))
    save_model_files(tmp_path / "model", model, build_pocket_tokenizer())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(compute_logits(plain), compute_logits(load(tmp_path / "model")))
    from safetensors import safe_open

    def list_names(place):
        with safe_open(place / "model.safetensors", "pt") as file:
            return sorted(file.keys())

    names = list_names(tmp_path / "model")
    assert names == list_names(folder)
    assert any(name.endswith(".mlp.experts.7.down_proj.weight") for name in names)
    before, after = load(folder).state_dict(), plain.state_dict()
    biases = [name for name in before if name.endswith("e_score_correction_bias")]
    assert len(biases) == (2 if "glm4" in str(folder) else 0)
    assert all(torch.equal(before[name], after[name]) and before[name].any() for name in biases)


def test_targets_that_name_no_weight_are_refused_with_those_of_the_experts(folder):
    with pytest.raises(ModelError, match=r"no linear layer 'w1'; its layers: .*q_proj.*; weights of its experts: expe"):
        load(folder, target_modules=("w1",))
    with pytest.raises(
        ModelError, match=r"model.lora.dropout=0.1: adapters of experts \(experts.down_proj\) have no dr"
    ):
        load(folder, target_modules=("experts.down_proj",), dropout=0.1)


def test_router_and_its_bias_stay_frozen_under_an_adapter(folder):
    for targets in ("attention", "all-linear", WEIGHTS):
        model = load(folder, r=4, target_modules=targets)
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert trained
        assert not any(".gate." in name or "correction_bias" in name for name in trained)
        assert any("experts" in name for name in trained) == (targets != "attention")


def test_linear_layers_with_names_of_experts_are_refused(folder):
    """PEFT would adapt the experts in place of the dense layer and the shared experts of GLM-4.x."""
    if "glm4" in str(folder):
        with pytest.raises(ModelError, match=r"PEFT takes 'down_proj' for weights of experts .* experts.down_proj"):
            load(folder, target_modules=("q_proj", "down_proj"))
    else:
        model = load(folder, r=4, target_modules=("q_proj", "down_proj"))
        assert all(".q_proj." in name or ".experts." in name for name in model.state_dict() if "lora_" in name)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_with_adapted_experts_is_traced_without_a_break(name):
    """CUDA paths of sampler and trainer compile layers; a break would leave every layer unfused."""
    config = CONFIGS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    add_adapter(model, LoraSection(r=16, target_modules=WEIGHTS), base="", dtype=torch.bfloat16)
    use_plan_attention(model)
    randomize(model)
    layer = model.model.layers[1]
    hidden = torch.randn(1, 9, 32, dtype=torch.bfloat16)
    angles = model.model.rotary_emb(hidden, torch.arange(9)[None])
    arguments = {"position_embeddings": angles, "attention_mask": None, "attention_plan": CausalPlan([9], CPU)}
    compiled = torch.compile(type(layer).forward, backend="eager", fullgraph=True)
    assert torch.equal(compiled(layer, hidden, **arguments), layer(hidden, **arguments))
