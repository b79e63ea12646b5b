"""The engine on vLLM on a GPU: pushed weights, and logprobs close to those of the trainer's model."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tunesmith.config import EngineSection
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.engine.vllm.engine import VllmEngine
from tunesmith.engine.vllm.support import find_version
from tunesmith.types import Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(find_version() is None, reason="needs the package vllm")]
PROMPTS = [[1 + index, 2, 3, 4] for index in range(32)]


def test_logprobs_follow_the_weights_of_this_process():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, tie_word_embeddings=True, max_position_embeddings=2048,
        initializer_range=0.1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()
    section = EngineSection(kind="vllm", max_num_seqs=64, vllm={"gpu_memory_share": 0.2, "has_eager": True})
    engine = VllmEngine(model, None, section, max_model_len=256)
    try:
        for version, scale in enumerate((1.0, 1.2, 0.9)):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(scale)
            engine.resume(version)
            assert measure_error(engine, model) < 0.1, f"version {version}"
    finally:
        engine.close()


@torch.no_grad()
def measure_error(engine, model):
    """Mean distance of the recorded logprobs from those of a plain forward."""

    async def run():
        return await asyncio.gather(*(engine.generate(each, Sampling(max_tokens=64)) for each in PROMPTS))

    errors = []
    for prompt, completion in zip(PROMPTS, run_lockstep(run()), strict=True):
        ids = torch.tensor([[*prompt, *completion.sampled_ids]], device="cuda")
        logprobs = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        own = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
        errors.append((own - torch.tensor(completion.logprobs)).abs().mean())
    return torch.stack(errors).mean()
