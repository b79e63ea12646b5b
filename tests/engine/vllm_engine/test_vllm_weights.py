"""What is pushed to vLLM: a checkpoint's names, merged adapters, bounded chunks."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from tiny_models import build_tiny
from tunesmith.config import LoraSection
from tunesmith.engine.vllm import weights
from tunesmith.model.adapters.lora import add_adapter


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_names_and_tensors_are_those_of_the_checkpoint(name, tmp_path):
    from safetensors.torch import load_file

    model = copy.deepcopy(build_tiny(name))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    pushed = dict(weights.iter_weights(model))
    assert pushed.keys() == saved.keys()
    assert all(torch.equal(pushed[key], saved[key]) for key in saved)


def test_an_adapter_is_merged_under_the_names_of_its_base():
    model = copy.deepcopy(build_tiny("llama"))
    base = {name: tensor.clone() for name, tensor in weights.iter_weights(model)}
    add_adapter(model, LoraSection(r=2, alpha=6.0), base="x", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.5)
    factors = dict(model.named_parameters())
    merged = dict(weights.iter_weights(model))
    assert merged.keys() == base.keys()
    path = "model.layers.0.self_attn.q_proj"
    delta = factors[f"{path}.lora_B.default.weight"] @ factors[f"{path}.lora_A.default.weight"] * (6.0 / 2)
    assert torch.allclose(merged[f"{path}.weight"], base[f"{path}.weight"] + delta, atol=1e-6)
    assert torch.equal(merged["model.layers.0.mlp.up_proj.weight"], base["model.layers.0.mlp.up_proj.weight"])


def test_chunks_hold_all_weights_in_order_within_the_limit(monkeypatch):
    monkeypatch.setattr(weights, "CHUNK_BYTES", 100)
    tensors = [(str(index), torch.zeros(size)) for index, size in enumerate((10, 10, 5, 200, 1))]
    chunks = list(weights.split_chunks(iter(tensors)))
    assert [[name for name, _ in chunk] for chunk in chunks] == [["0", "1", "2"], ["3"], ["4"]]


def test_gathered_weights_are_converted_on_the_cpu(monkeypatch):
    def revert(model, state):
        return {f"old.{name}": tensor for name, tensor in state.items()}

    monkeypatch.setattr(weights, "revert_weight_conversion", revert)
    gathered = {"one": torch.ones(2), "two": torch.zeros(3)}
    found = dict(weights.iter_weights(build_tiny("llama"), lambda: iter(gathered.items())))
    assert found.keys() == {"old.one", "old.two"} and torch.equal(found["old.one"], torch.ones(2))


def test_weights_that_need_no_conversion_are_gathered_one_at_a_time():
    taken = []

    def gather():
        for name in ("one", "two"):
            taken.append(name)
            yield name, torch.ones(1)

    found = weights.iter_weights(build_tiny("llama"), gather)
    assert taken == [] and next(found)[0] == "one" and taken == ["one"]


@pytest.mark.parametrize("has_own_head", [True, False])
def test_the_architecture_for_vllm_is_that_of_the_model(has_own_head, tmp_path):
    """Also where the config names none, as that of a model with new weights."""
    model = copy.deepcopy(build_tiny("qwen3"))
    model.config.architectures = None
    weights.save_config(model, tmp_path, has_own_head=has_own_head)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert model.config.architectures is None
