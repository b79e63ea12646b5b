"""The engine samples from an adapter in training, without merging it or repacking the base weights."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from engines import build_engine, build_prompts, compute_reference_logits, generate_all
from tiny_models import build_tiny
from tunesmith.config import LoraSection
from tunesmith.engine.cpu.layers import MIN_WEIGHTS, OneDnnLinears
from tunesmith.model.adapters.lora import add_adapter
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.model.load import check_vocabulary, load_model, load_tokenizer
from tunesmith.model.torch_modes import replaced
from tunesmith.types import Distribution, Sampling


def build_live(name="llama", **lora):
    model = copy.deepcopy(build_tiny(name))
    add_adapter(model, LoraSection(r=4, **lora), base="base", dtype=torch.float32)
    use_plan_attention(model)
    return model.eval()


def change_adapter(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3"])
def test_logprobs_are_those_of_the_current_adapter(name):
    model = build_live(name, target_modules="all-linear")
    engine = build_engine(model)
    prompts = build_prompts(5, 9)
    seen = []
    for version in (1, 2):
        change_adapter(model, version)
        engine.resume(version)
        sampling = Sampling(distribution=Distribution(), max_tokens=8)
        for prompt, completion in zip(prompts, generate_all(engine, prompts, sampling), strict=True):
            logits = compute_reference_logits(model, prompt, completion.sampled_ids)
            expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.sampled_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=1e-4)
            seen.append(completion.sampled_ids)
        engine.pause()
    assert seen[:2] != seen[2:]


def assert_sampled_as(model, reference):
    """The logprobs of what the model samples are those that the reference computes."""
    engine = build_engine(model)
    engine.resume(1)
    (prompt,) = build_prompts(7)
    (completion,) = generate_all(engine, [prompt], Sampling(distribution=Distribution(), max_tokens=6))
    logits = compute_reference_logits(reference, prompt, completion.sampled_ids)
    expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.sampled_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=1e-4)


def test_an_adapter_of_embeddings_is_sampled_as_peft_computes_it(pocket_folder, tmp_path):
    plain = AutoModelForCausalLM.from_pretrained(pocket_folder, dtype=torch.float32)
    config = LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"], base_model_name_or_path=str(pocket_folder))
    theirs = get_peft_model(plain, config).eval()
    change_adapter(theirs, 1)
    theirs.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"), lora=LoraSection())
    check_vocabulary(model, load_tokenizer(str(pocket_folder)))
    assert_sampled_as(model, theirs)


def test_an_adapter_on_a_4_bit_model_is_sampled_as_it_is_trained(pocket_folder):
    pytest.importorskip("bitsandbytes")
    lora = LoraSection(r=4, quantization="nf4")
    model = load_model(pocket_folder, dtype=torch.float32, device=torch.device("cpu"), lora=lora)
    change_adapter(model, 1)
    assert_sampled_as(model, model)


class Adapted(nn.Module):
    """A frozen and a trained layer, both large enough to be packed."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(256, 300).requires_grad_(False)
        self.factor = nn.Linear(256, 300)
        assert self.factor.weight.numel() >= MIN_WEIGHTS

    def forward(self, inputs):
        return self.base(inputs) + self.factor(inputs)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_frozen_layers_are_packed_once_and_trained_layers_never():
    layer, inputs = Adapted(), torch.randn(9, 256)  # with fewer rows even packed layers use the parameters
    linears = OneDnnLinears(layer)
    linears.refresh()
    with torch.no_grad():
        layer.factor.weight.mul_(2)
        before = layer.base(inputs)
        layer.base.weight.zero_()
    linears.refresh()
    with torch.no_grad(), replaced(linears.list_forwards(None)):
        output = layer(inputs)
    torch.testing.assert_close(output, before + layer.factor(inputs).detach(), atol=1e-5, rtol=1e-5)
