"""Recurrent layers on a CUDA device: decode graphs with states, forks of prompts, and gradients on tries."""

from __future__ import annotations

import asyncio
import copy
import dataclasses

import pytest
import torch
from test_trainer_gpu import build_samples, compute_error, compute_gradient

from recurrent_paths import PATHS, collect, run_separately, run_trie
from tiny_models import RECURRENT, build_tiny
from trainable_models import build_trainable
from tunesmith.config import AlgorithmSection, EngineSection, TrainerSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.model.experts import find_experts
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import Completion, Distribution, Sampling

pytestmark = pytest.mark.gpu
GREEDY = Distribution(temperature=0)
LENGTHS = (3, 1, 17, 30, 4, 65, 130, 8)


def build_engine(name: str, dtype: torch.dtype = torch.float32, **settings: object) -> LocalEngine:
    model = copy.deepcopy(build_tiny(name)).to(device="cuda", dtype=dtype)
    use_plan_attention(model)
    section = EngineSection(**({"page_size": 4, "kv_cache_tokens": 4000} | settings))
    return LocalEngine(model, None, section, max_model_len=256)


def build_prompts() -> list[list[int]]:
    """Prompts of several lengths, some of them twice, and forks of the longest."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 97, (length,), generator=generator).tolist() for length in LENGTHS]
    return [*prompts, *prompts[3:6], *([*prompts[6][:cut], 5, 6] for cut in (1, 2, 63, 64, 65, 100))]


def generate(engine: LocalEngine, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
    async def run() -> list[Completion]:
        samplings = [dataclasses.replace(sampling, seed=index) for index in range(len(prompts))]
        return await asyncio.gather(*map(engine.generate, prompts, samplings))

    return asyncio.run(run())


@pytest.mark.parametrize("cuda_decode", ["compiled", "graphs", "eager"])
@pytest.mark.parametrize("name", RECURRENT)
@torch.no_grad()
def test_greedy_tokens_are_those_of_a_full_forward(name: str, cuda_decode: str) -> None:
    if any(find_experts(build_tiny(name))) and cuda_decode != "eager":
        pytest.skip("experts in float32 are not captured")
    engine, prompts = build_engine(name, cuda_decode=cuda_decode, max_num_seqs=8), build_prompts()
    for _ in range(2):  # the second time from snapshots
        for prompt, completion in zip(
            prompts, generate(engine, prompts, Sampling(max_tokens=21, distribution=GREEDY)), strict=True
        ):
            ids = torch.tensor([[*prompt, *completion.sampled_ids]])
            logits = build_tiny(name)(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            assert list(completion.sampled_ids) == logits.argmax(-1).tolist()
            torch.testing.assert_close(torch.tensor(completion.logprobs), logits.amax(-1), atol=1e-3, rtol=0)
    assert engine.compute_stats()["engine/num_cached_tokens"] > 0


@pytest.mark.parametrize("cuda_decode", ["compiled", "graphs"])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "falcon_h1"])
def test_forks_chunks_and_preemption_change_no_token(name: str, cuda_decode: str) -> None:
    prompts, sampling = build_prompts(), Sampling(max_tokens=20)
    expected = generate(build_engine(name, has_prefix_cache=False, cuda_decode=cuda_decode), prompts, sampling)
    engine = build_engine(name, kv_cache_tokens=300, max_batched_tokens=50, decode_block=4, cuda_decode=cuda_decode)
    found = [generate(engine, prompts, sampling) for _ in range(2)]
    stats = engine.compute_stats()
    assert stats["engine/num_preemptions"] > 0 and stats["engine/num_cached_tokens"] > 0
    for run, completions in enumerate(found):
        for index, (ours, theirs) in enumerate(zip(completions, expected, strict=True)):
            label = f"run {run}, request {index} with {len(prompts[index])} tokens: "
            differences = torch.tensor(ours.logprobs) - torch.tensor(theirs.logprobs)
            assert ours.sampled_ids == theirs.sampled_ids, f"{label}{differences}"
            assert differences.abs().max() < 1e-3, f"{label}{differences}"


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_tokens_that_the_host_samples_continue_from_the_same_states(name: str) -> None:
    """A penalty of a thousandth makes the host sample, and changes no greedy token."""
    plain = generate(build_engine(name), build_prompts(), Sampling(max_tokens=20, distribution=GREEDY))
    tiny = Distribution(temperature=0, presence_penalty=1e-6)
    hosted = generate(build_engine(name), build_prompts(), Sampling(max_tokens=20, distribution=tiny))
    assert [each.sampled_ids for each in hosted] == [each.sampled_ids for each in plain]


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "qwen3_next"])
def test_gradients_on_a_trie_are_those_of_separate_rows_and_of_the_cpu(name: str, kind: str) -> None:
    model = build_trainable(name)
    expected = collect(model, run_separately(model, PATHS[kind]))
    model.cuda()
    for run in (run_trie, run_separately):
        for ours, theirs in zip(collect(model, run(model, PATHS[kind])), expected, strict=True):
            # cosines of the rotary embedding are float32, and those of a GPU differ
            assert (ours.cpu() - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "falcon_h1"])
def test_float32_gradients_of_packed_rows_agree_with_float64_on_the_cpu(name: str) -> None:
    samples = build_samples(8)
    exact = compute_gradient(build_trainable(name), samples)
    model = build_trainable(name, dtype=torch.float32).cuda()
    modes = ({}, {"max_tokens": 700, "chunk_tokens": 100}, {"has_sharing": False})
    modes = (*modes, *({"is_compiled": True} | mode for mode in modes))
    errors = [compute_error(compute_gradient(model, samples, **mode), exact) for mode in modes]
    assert max(errors) < 1e-3, errors


@pytest.mark.parametrize("has_checkpointing", [True, False])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_steps_in_bfloat16_lower_the_loss(name: str, has_checkpointing: bool) -> None:
    model = build_trainable(name, dtype=torch.bfloat16).cuda()
    settings = TrainerSection(learning_rate=1e-2, mismatch_stop=1e9, has_gradient_checkpointing=has_checkpointing)
    trainer = Trainer(model, settings, AlgorithmSection(), max_model_len=256, num_total_steps=4)
    losses = [trainer.step(build_samples(8))["train/loss"] for _ in range(3)]
    assert losses[-1] < losses[0]
