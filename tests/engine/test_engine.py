"""The engine's tokens and logprobs are those of the model, independent of the batch."""

from __future__ import annotations

import asyncio
import os
from contextlib import nullcontext

import pytest
import torch

from engines import GREEDY, build_engine, build_prompts, compute_reference_logits, generate_all
from tiny_models import CONFIGS, RECURRENT, build_tiny
from tunesmith.config import EngineSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.engine.worker.model_runner import check_fp8_device
from tunesmith.errors import ConfigError, EngineError
from tunesmith.model.forward.distribution import truncate_logits
from tunesmith.model.load import load_model
from tunesmith.types import Completion, Distribution, Sampling

PROMPT_LENGTHS = (3, 17, 30, 4, 65, 8)
SMOLLM2 = os.environ.get("TUNESMITH_SMOLLM2")


@pytest.mark.parametrize("name", [*CONFIGS, *RECURRENT])
def test_greedy_equals_generate_token_for_token(name: str) -> None:
    prompts = build_prompts(*PROMPT_LENGTHS)
    completions = generate_all(build_engine(name), prompts, Sampling(max_tokens=8, distribution=GREEDY))
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = build_tiny(name).generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert list(completion.sampled_ids) == ids[0, len(prompt) :].tolist()
        assert completion.stop_reason == "length"


@pytest.mark.skipif(SMOLLM2 is None, reason="TUNESMITH_SMOLLM2 names no folder")
def test_greedy_equals_generate_on_smollm2() -> None:
    model = load_model(str(SMOLLM2), dtype=torch.float32, device=torch.device("cpu"))
    prompts = [[1, 4093, 198, *range(500, 500 + length)] for length in (5, 40, 23)]
    engine = LocalEngine(model, None, EngineSection(kv_cache_tokens=2000), max_model_len=256)
    completions = generate_all(engine, prompts, Sampling(max_tokens=24, distribution=GREEDY, ignore_eos=True))
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False)
        logits = compute_reference_logits(model, prompt, completion.sampled_ids)
        assert list(completion.sampled_ids) == ids[0, len(prompt) :].tolist()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.sampled_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


ALL_SETTINGS = Distribution(temperature=2.0, top_k=30, top_p=0.9, min_p=0.01, logit_bias=((5, 3.0), (6, -100.0)))


@pytest.mark.parametrize(
    ("name", "distribution"),
    [
        ("llama", Distribution()),
        ("llama", GREEDY),
        ("llama", Distribution(temperature=0.6)),
        ("llama", Distribution(top_k=4)),
        ("llama", Distribution(top_p=0.7, temperature=1.4)),
        ("llama", Distribution(min_p=0.1)),
        ("llama", ALL_SETTINGS),
        ("gemma2", ALL_SETTINGS),  # caps its logits
    ],
)
def test_logprobs_equal_a_full_forward_under_every_setting(name: str, distribution: Distribution) -> None:
    prompts = build_prompts(*PROMPT_LENGTHS)
    engine = build_engine(name, max_batched_tokens=24)
    for prompt, completion in zip(
        prompts, generate_all(engine, prompts, Sampling(max_tokens=10, distribution=distribution)), strict=True
    ):
        ids = torch.tensor(completion.sampled_ids)
        logits = compute_reference_logits(build_tiny(name), prompt, completion.sampled_ids)
        expected = truncate_logits(logits, distribution, keep_ids_N=ids).log_softmax(-1).gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma3", "lfm2", "qwen3_5"])
def test_chunks_preemption_and_shared_prefixes_do_not_change_tokens(name: str) -> None:
    prompts = [[*build_prompts(20)[0], *tail] for tail in build_prompts(1, 9, 30, 5, 2)] * 2
    sampling = Sampling(max_tokens=20)
    expected = generate_all(build_engine(name, has_prefix_cache=False), prompts, sampling)
    engine = build_engine(name, kv_cache_tokens=160, max_batched_tokens=11)
    completions = generate_all(engine, prompts, sampling)
    stats = engine.compute_stats()
    assert [c.sampled_ids for c in completions] == [c.sampled_ids for c in expected]
    assert stats["engine/num_preemptions"] > 0
    assert stats["engine/num_cached_tokens"] > 0


def test_a_group_computes_its_prompt_once() -> None:
    engine = build_engine()
    completions = generate_all(engine, build_prompts(22) * 8, Sampling(max_tokens=5))
    stats = engine.compute_stats()
    assert stats["engine/num_prefill_tokens"] == 22 + 7 * 2
    assert stats["engine/num_cached_tokens"] == 7 * 20
    assert sorted(c.num_cached_tokens for c in completions) == [0] + [20] * 7
    assert stats["engine/num_sampled_tokens"] == 8 * 5
    assert stats["engine/num_requests"] == 8
    assert len({c.sampled_ids for c in completions}) == 8
    assert engine.compute_stats()["engine/num_steps"] == 0


def test_idle_time_is_the_time_without_requests_while_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only the test moves: 2 s before the first request, 3 s between two, none while paused."""
    now = [0.0]
    engine = build_engine()
    monkeypatch.setattr("tunesmith.engine.core.base_engine.time.perf_counter", lambda: now[0])

    async def run() -> None:
        for waited_s in (2.0, 3.0):
            now[0] += waited_s
            await engine.generate([1, 2], Sampling(max_tokens=3))

    engine.resume(1)
    run_lockstep(run())
    engine.pause()
    now[0] += 7.0
    stats = engine.compute_stats()
    assert stats["perf/engine_idle_s"] == 5.0 and stats["perf/engine_busy_s"] == 0.0
    assert engine.compute_stats()["perf/engine_idle_s"] == 0.0


def test_a_prompt_that_fills_the_context_is_refused_and_a_full_context_ends_a_completion() -> None:
    engine = build_engine(max_model_len=10)
    with pytest.raises(ValueError, match="a prompt of 10 tokens fills the context of 10"):
        generate_all(engine, build_prompts(10), Sampling(max_tokens=50))
    (fits,) = generate_all(engine, build_prompts(7), Sampling(max_tokens=50))
    assert (len(fits.sampled_ids), fits.stop_reason) == (3, "context")


def test_a_cache_smaller_than_the_context_limits_the_context(caplog: pytest.LogCaptureFixture) -> None:
    engine = build_engine(kv_cache_tokens=16)
    assert "the KV cache has room for 16 tokens, fewer than model.max_model_len=128" in caplog.text
    assert engine.max_model_len == 17
    (grows,) = generate_all(engine, build_prompts(10), Sampling(max_tokens=50))
    assert (len(grows.sampled_ids), grows.stop_reason) == (7, "context")


def test_every_stop_condition_ends_a_completion_and_its_token_is_kept() -> None:
    model = build_engine()._runner.model
    model.generation_config.eos_token_id = [5, 6]
    engine = build_engine(model)
    (prompt,) = build_prompts(6)
    (free,) = generate_all(engine, [prompt], Sampling(max_tokens=40, ignore_eos=True))
    target = free.sampled_ids[10]
    first = free.sampled_ids.index(target)

    def run(**settings: object) -> Completion:
        return generate_all(engine, [prompt], Sampling(max_tokens=40, **settings))[0]

    stopped = run(stop_token_ids=(target,), ignore_eos=True)
    assert (stopped.sampled_ids, stopped.stop_reason) == (free.sampled_ids[: first + 1], "stop")
    text = engine._tokenizer.decode([target])
    assert run(stop=(text,), ignore_eos=True).stop_reason == "stop"
    always_eos = Distribution(logit_bias=((6, 100.0),))
    ended = run(distribution=always_eos)
    assert (ended.sampled_ids, ended.stop_reason) == ((6,), "eos")
    assert run(distribution=always_eos, ignore_eos=True).stop_reason == "length"


def test_after_an_update_no_old_keys_are_read_and_old_tokens_keep_their_version() -> None:
    engine = build_engine()
    model = engine._runner.model
    prompts = build_prompts(9, 21)

    async def run() -> list[Completion]:
        received: list[int] = []
        tasks = [
            asyncio.ensure_future(
                engine.generate(
                    prompt, Sampling(max_tokens=12, distribution=GREEDY), on_tokens=lambda ids, _: received.extend(ids)
                )
            )
            for prompt in prompts
        ]
        while len(received) < 10:
            await asyncio.sleep(0)
            await engine.generate([1], Sampling(max_tokens=1))
        engine.pause()
        assert not engine.has_work
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.7).add_(0.05)
        engine.resume(1)
        return await asyncio.gather(*tasks)

    for prompt, completion in zip(prompts, run_lockstep(run()), strict=True):
        num_old = completion.policy_versions.count(0)
        assert 0 < num_old < 12
        assert completion.policy_versions == (0,) * num_old + (1,) * (12 - num_old)
        expected = compute_reference_logits(model, prompt, completion.sampled_ids)[num_old:].log_softmax(-1).max(-1)
        assert list(completion.sampled_ids[num_old:]) == expected.indices.tolist()
        torch.testing.assert_close(torch.tensor(completion.logprobs[num_old:]), expected.values, atol=1e-4, rtol=0)


def test_resuming_the_same_version_again_finds_no_cached_block() -> None:
    engine = build_engine()
    for _ in range(2):
        engine.resume(3)
        (completion,) = generate_all(engine, build_prompts(20), Sampling(max_tokens=2))
        assert completion.num_cached_tokens == 0
        assert completion.policy_versions == (3, 3)


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "no tokens"),
        ([97], {}, "must lie in"),
        ([-1], {}, "must lie in"),
        ([1], {"max_tokens": 0}, "max_tokens=0"),
        ([1], {"stop_token_ids": (3, 97)}, "stop_token_ids must lie in .*; got 97"),
        ([1], {"distribution": Distribution(temperature=-1.0)}, "temperature=-1.0"),
        ([1], {"distribution": Distribution(top_p=0.0)}, "top_p=0.0"),
        ([1], {"distribution": Distribution(logit_bias=((97, 1.0),))}, "logit_bias"),
    ],
)
def test_an_invalid_request_is_refused(prompt: list[int], settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_lockstep(build_engine().generate(prompt, Sampling(**({"max_tokens": 4} | settings))))


def build_broken_engine(*, page_size: int) -> LocalEngine:
    """Logits after token 13 are not finite."""
    engine = build_engine(page_size=page_size)
    with torch.no_grad():
        engine._runner.model.get_input_embeddings().weight[13] = torch.nan
    return engine


def run_all(engine: LocalEngine, prompts: list[list[int]]) -> list[Completion | BaseException]:
    async def run() -> list[Completion | BaseException]:
        calls = [engine.generate(prompt, Sampling(max_tokens=6, distribution=GREEDY)) for prompt in prompts]
        return await asyncio.gather(*calls, return_exceptions=True)

    return run_lockstep(run())


def test_non_finite_logits_fail_only_their_request() -> None:
    engine = build_broken_engine(page_size=16)
    good, bad, other = run_all(engine, [[1, 2, 3], [4, 13, 5], [6, 7]])
    assert isinstance(bad, EngineError)
    assert "request 1 are not finite after 3 tokens" in str(bad)
    assert isinstance(good, Completion)
    assert isinstance(other, Completion)
    after, again = run_all(engine, [[1, 2, 3], [8, 9, 10]])
    assert after == Completion(**{name: getattr(good, name) for name in good.__slots__})
    assert isinstance(again, Completion)


@pytest.mark.parametrize("bad_prompt", [[1, 2, 3, 4, 13], [1, 2, 3, 4, 5, 6, 13]])
def test_a_failed_request_does_not_affect_requests_with_the_same_prompt(bad_prompt: list[int]) -> None:
    engine = build_broken_engine(page_size=4)
    good = [1, 2, 3, 4, 5]
    (alone,) = run_all(engine, [good])
    engine.pause()
    engine.resume(1)
    first, bad, last = run_all(engine, [good, bad_prompt, good])
    assert isinstance(bad, EngineError)
    assert isinstance(alone, Completion)
    for completion in (first, last):
        assert isinstance(completion, Completion)
        assert completion.sampled_ids == alone.sampled_ids
        assert completion.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_fp8_weights_are_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="engine.weight_format=fp8 needs a GPU, and model.device is cpu"):
        build_engine("llama", weight_format="fp8")


@pytest.mark.parametrize(("capability", "is_refused"), [((8, 0), True), ((8, 9), False), ((9, 0), False)])
def test_fp8_weights_are_refused_on_a_gpu_without_fp8_products(monkeypatch, capability, is_refused) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    with pytest.raises(ConfigError, match="8.9 .* a GPU has 8.0") if is_refused else nullcontext():
        check_fp8_device(torch.device("cuda"))
