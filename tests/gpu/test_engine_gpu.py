"""On a CUDA device the engine returns the tokens and logprobs of the model's own forward, as on a CPU."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch
from transformers import PreTrainedModel

from tiny_models import CONFIGS, MIXTURES, build_tiny
from tunesmith.config import EngineSection
from tunesmith.engine.batch.sampler import sample_tokens
from tunesmith.engine.engine import LocalEngine
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.types import Completion, Distribution, Sampling

pytestmark = pytest.mark.gpu
GREEDY = Distribution(temperature=0)
LENGTHS = (3, 17, 30, 4, 65, 8)


def build_model(name: str, dtype: torch.dtype, device: str = "cuda") -> PreTrainedModel:
    model = copy.deepcopy(build_tiny(name)).to(device=device, dtype=dtype)
    use_plan_attention(model)
    return model


def generate_all(model: PreTrainedModel, sampling: Sampling, **settings: object) -> list[tuple[list[int], Completion]]:
    section = EngineSection(**({"page_size": 4, "kv_cache_tokens": 4000, "cuda_decode": "graphs"} | settings))
    engine = LocalEngine(model, None, section, max_model_len=128)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 97, (length,), generator=generator).tolist() for length in LENGTHS]

    async def run() -> list[Completion]:
        return await asyncio.gather(*[engine.generate(prompt, sampling) for prompt in prompts])

    return list(zip(prompts, asyncio.run(run()), strict=True))


@torch.no_grad()
def compute_reference(model: PreTrainedModel, prompt: list[int], completion: Completion) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *completion.sampled_ids]], device="cuda")
    return model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in MIXTURES])
def test_greedy_tokens_and_logprobs_equal_a_full_forward(name: str) -> None:
    model = build_model(name, torch.float32)
    for prompt, completion in generate_all(model, Sampling(max_tokens=12, distribution=GREEDY)):
        expected = compute_reference(model, prompt, completion).max(-1)
        assert list(completion.sampled_ids) == expected.indices.tolist()
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected.values.cpu(), atol=1e-4, rtol=0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("cuda_decode", ["compiled", "graphs"])
def test_an_engine_on_the_second_gpu_samples_the_same(cuda_decode: str) -> None:
    sampling, settings = Sampling(max_tokens=12, seed=3), {"cuda_decode": cuda_decode}
    first, second = (
        generate_all(build_model("qwen3", torch.bfloat16, device), sampling, **settings)
        for device in ("cuda:0", "cuda:1")
    )
    assert torch.cuda.current_device() == 0
    for (_, one), (_, other) in zip(first, second, strict=True):
        assert one.sampled_ids == other.sampled_ids and one.logprobs == other.logprobs


def test_preemption_and_chunked_prefill_change_no_token() -> None:
    model = build_model("qwen3", torch.float32)
    sampling = Sampling(max_tokens=20, seed=5)
    plenty = generate_all(model, sampling)
    short = generate_all(model, sampling, kv_cache_tokens=120, max_batched_tokens=11)
    assert [completion.sampled_ids for _, completion in plenty] == [completion.sampled_ids for _, completion in short]


def test_bfloat16_logprobs_are_close_to_a_full_forward() -> None:
    model = build_model("llama", torch.bfloat16)
    differences = []
    for prompt, completion in generate_all(model, Sampling(max_tokens=20)):
        ids = torch.tensor(completion.sampled_ids, device="cuda")[:, None]
        expected = compute_reference(model, prompt, completion).gather(1, ids)[:, 0].cpu()
        differences.append((torch.tensor(completion.logprobs) - expected).abs())
    assert torch.cat(differences).mean() < 0.1


def test_sampling_on_cuda_equals_sampling_on_the_cpu() -> None:
    seeds, positions = list(range(-50, 50)), list(range(100))
    logits = torch.randn(100, 3000, generator=torch.Generator().manual_seed(0)) * 3
    distributions = [Distribution(), Distribution(top_p=0.8), Distribution(top_k=9, temperature=0.5), GREEDY] * 25
    here = sample_tokens(logits.clone(), distributions, seeds, positions)
    there = sample_tokens(logits.cuda(), distributions, seeds, positions)
    assert here.token_ids == there.token_ids
    torch.testing.assert_close(torch.tensor(here.logprobs), torch.tensor(there.logprobs), atol=1e-5, rtol=0)
