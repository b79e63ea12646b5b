"""gpt-oss: sinks against transformers' own attention, experts stored in four bits, adapters and exports."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from fakes import build_chat_tokenizer
from tiny_models import build_tiny
from tunesmith.commands.export.run import run_export
from tunesmith.config import ExportSection, LoraSection
from tunesmith.model.adapters.lora import save_adapter
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.model.load import load_model

CPU = torch.device("cpu")
IDS = torch.arange(3, 40)[None]
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@torch.no_grad()
def compute_logits(model: PreTrainedModel) -> Tensor:
    return model(IDS).logits


def test_sinks_have_the_gradients_of_transformers_own_attention():
    models = [copy.deepcopy(build_tiny("gpt_oss")) for _ in range(2)]
    use_plan_attention(models[0])
    for model in models:
        model(IDS).logits.square().mean().backward()
    ours, theirs = ({name: each.grad for name, each in model.named_parameters()} for model in models)
    assert sum(name.endswith("sinks") for name in ours) == 3
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=1e-5, msg=name)


def pack(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of 32 codes, two of them in a byte, and their exponents, as MXFP4 stores them."""
    pairs = codes.view(*codes.shape[:2], -1, 16, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8), scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_in_four_bits_are_dequantized_when_they_are_loaded(dtype, tmp_path):
    model = copy.deepcopy(build_tiny("gpt_oss"))
    model.config.intermediate_size, model.config.vocab_size = 32, 512
    model = type(model)(model.config).to(dtype)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expected, generator = {}, torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_inputs, num_outputs = tensors.pop(name).shape
        codes = torch.randint(0, 16, (num_experts, num_outputs, num_inputs), generator=generator)
        scales = torch.randint(124, 128, (num_experts, num_outputs, num_inputs // 32), generator=generator)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = pack(codes, scales.to(torch.uint8))
        values = FP4[codes % 8] * (1 - 2 * (codes // 8)) * 2.0 ** (scales - 127).repeat_interleave(32, dim=2)
        expected[name] = values.transpose(1, 2).to(dtype)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model.config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    model.config.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype=dtype, device=CPU)
    state = loaded.state_dict()
    assert {each.dtype for each in state.values()} == {dtype}
    for name, values in expected.items():
        assert torch.equal(state[name], values)
    loaded.save_pretrained(tmp_path / "saved")
    again = load_model(str(tmp_path / "saved"), dtype=dtype, device=CPU)
    for name, values in again.state_dict().items():
        assert torch.equal(values, state[name]), name
    build_chat_tokenizer("{{ messages }}").save_pretrained(tmp_path)
    exported = run_export(ExportSection(path=str(tmp_path), has_verification=False), out_dir=tmp_path / "export")
    again = load_model(exported.model_path, dtype=dtype, device=CPU)
    for name, values in again.state_dict().items():
        assert torch.equal(values.to(torch.bfloat16), state[name].to(torch.bfloat16)), name


@pytest.mark.parametrize("name", ["gpt_oss", "gemma4"])
def test_an_adapter_of_attention_and_experts_is_saved_and_merged(name, tmp_path):
    copy.deepcopy(build_tiny(name)).save_pretrained(tmp_path / "base")
    targets = ("q_proj", "experts.gate_up_proj", "experts.down_proj")
    lora = LoraSection(r=4, target_modules=targets)
    model = load_model(str(tmp_path / "base"), dtype=torch.float32, device=CPU, lora=lora)
    plain = compute_logits(model)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    expected = compute_logits(model)
    assert (expected - plain).abs().max() > 0.1
    save_adapter(tmp_path / "adapter", model)
    path = str(tmp_path / "adapter")
    for loaded in (
        load_model(path, dtype=torch.float32, device=CPU),
        load_model(path, dtype=torch.float32, device=CPU, lora=lora),
    ):
        torch.testing.assert_close(compute_logits(loaded), expected, rtol=1e-4, atol=1e-4)
