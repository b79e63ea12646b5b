"""CUDA decode graphs sample from the adapter's current weights, on a full-precision and on an NF4 base."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
import torch
from transformers import PreTrainedModel

from tunesmith.config import EngineSection, LoraSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.model.adapters.adapter import disabled_adapter
from tunesmith.model.load import load_model
from tunesmith.types import Completion, Sampling

pytestmark = pytest.mark.gpu
LENGTHS = (3, 17, 30, 4)


def load_with_adapter(folder: str, quantization: str) -> PreTrainedModel:
    if quantization == "nf4":
        pytest.importorskip("bitsandbytes")
    lora = LoraSection(r=8, target_modules="all-linear", quantization=quantization)
    return load_model(folder, dtype=torch.bfloat16, device=torch.device("cuda:0"), lora=lora)


def change_adapter(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, device="cuda")
                parameter.copy_((noise * 0.1).to(parameter.dtype))


async def generate_all(engine: LocalEngine, prompts: list[list[int]]) -> list[Completion]:
    return await asyncio.gather(*[engine.generate(prompt, Sampling(max_tokens=24)) for prompt in prompts])


@torch.no_grad()
def compute_gap(model: PreTrainedModel, prompt: list[int], completion: Completion) -> float:
    """Mean absolute difference between the engine's logprobs and those of the model's own forward."""
    ids = torch.tensor([[*prompt, *completion.sampled_ids]], device="cuda")
    logprobs = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(completion.sampled_ids, device="cuda")[:, None])[:, 0].cpu()
    return (expected - torch.tensor(completion.logprobs)).abs().mean().item()


@pytest.mark.parametrize(("quantization", "cuda_decode"), [("none", "graphs"), ("nf4", "graphs"), ("none", "compiled")])
def test_graphs_follow_the_adapter(
    pocket_folder: str, quantization: str, cuda_decode: Literal["graphs", "compiled"]
) -> None:
    model = load_with_adapter(pocket_folder, quantization)
    settings = EngineSection(kv_cache_tokens=8000, cuda_decode=cuda_decode)
    engine = LocalEngine(model, None, settings, max_model_len=128)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(9, 500, (length,), generator=generator).tolist() for length in LENGTHS]
    for version in (1, 2):
        change_adapter(model, version)
        engine.resume(version)
        for prompt, completion in zip(prompts, asyncio.run(generate_all(engine, prompts)), strict=True):
            assert compute_gap(model, prompt, completion) < 0.05
            with disabled_adapter(model):
                assert compute_gap(model, prompt, completion) > 0.2
        engine.pause()
