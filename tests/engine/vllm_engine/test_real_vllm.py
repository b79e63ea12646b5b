"""The engine on a real vLLM: set TUNESMITH_VLLM_PYTHON to an interpreter that has it (its CPU build serves)."""

from __future__ import annotations

import asyncio
import math
import os

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines import TOKENIZER
from tunesmith.config import EngineSection
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.engine.vllm.engine import VllmEngine
from tunesmith.types import Distribution, Sampling

PYTHON = os.environ.get("TUNESMITH_VLLM_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="needs TUNESMITH_VLLM_PYTHON, an interpreter that has vLLM")
PROMPTS = [[1 + index, 2, 3, 4] for index in range(6)]


@pytest.fixture(scope="module")
def engine(pocket_folder):
    model = AutoModelForCausalLM.from_pretrained(pocket_folder).eval()
    section = EngineSection(kind="vllm", max_num_seqs=16, kv_cache_gib=0.25, vllm={"python": PYTHON, "has_eager": True})
    built = VllmEngine(model, TOKENIZER, section, max_model_len=128)
    built.resume(0)
    yield built
    built.close()


@torch.no_grad()
def score(engine, prompt, sampled, distribution=Distribution()):
    """Logprobs of the sampled tokens by a plain forward of the trainer's model."""
    logits = engine._model(torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1].float()
    logits = logits / distribution.temperature
    if distribution.top_k:
        smallest = logits.topk(distribution.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -math.inf)
    return logits.log_softmax(-1).gather(1, torch.tensor(sampled)[:, None])[:, 0]


def sample_all(engine, distribution=Distribution(), max_tokens=24):
    async def run():
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True, distribution=distribution)
        return await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in PROMPTS))

    return run_lockstep(run())


def find_error(engine, completions, distribution=Distribution()):
    return max(
        (score(engine, prompt, each.sampled_ids, distribution) - torch.tensor(each.logprobs)).abs().max().item()
        for prompt, each in zip(PROMPTS, completions, strict=True)
    )


@pytest.mark.parametrize("distribution", [Distribution(), Distribution(temperature=0.7, top_k=5)])
def test_logprobs_are_those_of_the_distribution_under_the_trainers_weights(engine, distribution):
    completions = sample_all(engine, distribution)
    assert all(len(each.sampled_ids) == 24 for each in completions)
    assert find_error(engine, completions, distribution) < 1e-4


def test_every_kind_of_weight_is_pushed(engine):
    for part in ("norm", "embed", "q_proj", "o_proj", "gate_proj", "down_proj"):
        with torch.no_grad():
            for name, parameter in engine._model.named_parameters():
                if part in name:
                    parameter.mul_(1.3)
        engine.resume(engine.policy_version + 1)
        assert find_error(engine, sample_all(engine)) < 1e-4, part


def test_requests_in_flight_go_on_under_new_weights(engine):
    async def run():
        sampled = []
        sampling = Sampling(max_tokens=100, ignore_eos=True)
        requests = asyncio.gather(
            *(engine.generate(each, sampling, on_tokens=lambda ids, *_: sampled.extend(ids)) for each in PROMPTS)
        )
        while not sampled and not requests.done():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        engine.pause()
        with torch.no_grad():
            for parameter in engine._model.parameters():
                parameter.mul_(0.8)
        engine.resume(version)
        return await requests

    version = engine.policy_version + 1
    completions = run_lockstep(run())
    assert any(version in each.policy_versions for each in completions)
    for prompt, each in zip(PROMPTS, completions, strict=True):
        num_old = each.policy_versions.count(version - 1)
        assert len(each.sampled_ids) == 100 and each.policy_versions.count(version) == 100 - num_old
        new = score(engine, prompt, each.sampled_ids)[num_old:] - torch.tensor(each.logprobs[num_old:])
        assert new.numel() == 0 or new.abs().max() < 1e-4
