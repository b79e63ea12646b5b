"""On a CUDA device requests that are unfinished when the weights change have the logprobs of each token's version."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch

from tiny_models import build_tiny
from tunesmith.config import EngineSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.types import Completion, Sampling

pytestmark = pytest.mark.gpu
PROMPTS = [[1, 2, 3, 4, 5], list(range(40, 61)), [7, 9]]


def run_changed(*, keeps_cache: bool, decode: str) -> tuple[list[Completion], list[torch.nn.Module]]:
    """Completions with an update after the first tokens, and the model with the weights of both versions."""
    old = copy.deepcopy(build_tiny("llama")).to("cuda")
    new, sampled = copy.deepcopy(old), copy.deepcopy(old)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    use_plan_attention(sampled)
    section = EngineSection(page_size=4, kv_cache_tokens=4000, cuda_decode=decode, decode_block=4)
    engine = LocalEngine(sampled, None, section, max_model_len=128)

    async def run() -> list[Completion]:
        first = asyncio.Event()
        sampling = [
            asyncio.ensure_future(
                engine.generate(prompt, Sampling(max_tokens=30), order=(i,), on_tokens=lambda ids, _: first.set())
            )
            for i, prompt in enumerate(PROMPTS)
        ]
        await first.wait()
        engine.pause()
        with torch.no_grad():
            for parameter, value in zip(sampled.parameters(), new.parameters(), strict=True):
                parameter.copy_(value)
        engine.resume(1, keeps_cache=keeps_cache)
        return await asyncio.gather(*sampling)

    return run_lockstep(run()), [old, new]


@torch.no_grad()
def score(model: torch.nn.Module, prompt: list[int], completion: Completion) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *completion.sampled_ids]], device="cuda")
    logprobs = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return logprobs.gather(1, torch.tensor(completion.sampled_ids, device="cuda")[:, None])[:, 0].cpu()


@pytest.mark.parametrize("decode", ["graphs", "eager"])
def test_each_token_has_the_logprob_of_the_weights_of_its_version(decode: str) -> None:
    completions, models = run_changed(keeps_cache=False, decode=decode)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        versions = torch.tensor(completion.policy_versions)
        assert set(versions.tolist()) == {0, 1}
        expected = torch.stack([score(model, prompt, completion) for model in models]).gather(0, versions[None])[0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_a_kept_cache_is_marked_with_its_version() -> None:
    completions, models = run_changed(keeps_cache=True, decode="graphs")
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert set(completion.policy_versions) == {0}
        mixed = torch.tensor(completion.logprobs)
        assert all((mixed - score(model, prompt, completion)).abs().max() > 1e-3 for model in models)
