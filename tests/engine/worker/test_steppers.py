"""Asynchronous steps in bursts give the tokens of synchronous steps."""

from __future__ import annotations

import asyncio
import dataclasses
import functools

import numpy as np
import pytest
import torch

from engines import GREEDY, build_engine, build_prompts, generate_all
from host_bursts import HostBurstDecoder, build_burst_engine
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.engine.worker.steppers import STEPS_BETWEEN_PREFILLS
from tunesmith.errors import EngineError
from tunesmith.types import Completion, Distribution, Sampling, TokenDetails


def get_decoder(engine: LocalEngine) -> HostBurstDecoder:
    decoder = engine._runner._burst_decoder
    assert isinstance(decoder, HostBurstDecoder)
    return decoder


def strip(completions: list[Completion]) -> list[tuple[tuple[int, ...], str]]:
    return [(completion.sampled_ids, completion.stop_reason) for completion in completions]


@functools.cache
def generate_in_single_steps(sampling: Sampling) -> list[Completion]:
    """What synchronous steps give for the prompts of the next test."""
    return generate_all(build_engine(), build_prompts(3, 17, 30, 4), sampling)


@pytest.mark.parametrize("burst_length", [1, 3, 16])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=1),
        Sampling(max_tokens=13),
        Sampling(max_tokens=40, stop_token_ids=(11, 12, 13, 14)),
        Sampling(max_tokens=40, stop=("a", "e")),
        Sampling(max_tokens=9, distribution=Distribution(top_k=4, top_p=0.9)),
        Sampling(max_tokens=9, distribution=Distribution(logit_bias=((5, 3.0),))),
    ],
)
def test_tokens_and_stop_reasons_equal_those_of_synchronous_steps(burst_length: int, sampling: Sampling) -> None:
    prompts = build_prompts(3, 17, 30, 4)
    expected = generate_in_single_steps(sampling)
    engine = build_burst_engine(decode_block=burst_length)
    completions = generate_all(engine, prompts, sampling)
    assert strip(completions) == strip(expected)
    for ours, theirs in zip(completions, expected, strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
    assert engine._output_processor.scheduler.pool.num_available == engine._runner.num_blocks
    assert not engine.has_work


def test_a_burst_is_queued_before_the_previous_one_is_read() -> None:
    engine = build_burst_engine(decode_block=4)
    generate_all(engine, build_prompts(5, 9), Sampling(max_tokens=20))
    assert get_decoder(engine).max_unread == 2
    assert all(handle.is_read for handle in get_decoder(engine).handles)


def test_bursts_between_the_chunks_of_a_prompt_are_short() -> None:
    engine = build_burst_engine(decode_block=16, max_batched_tokens=10)
    generate_all(engine, build_prompts(5, 41), Sampling(max_tokens=40, distribution=GREEDY))
    num_steps = [len(handle.output.token_ids_LR) - 1 for handle in get_decoder(engine).handles]
    # the first forward has 5 tokens of the long prompt, three have 10, and the last 6 end it
    assert num_steps[:5] == [STEPS_BETWEEN_PREFILLS] * 4 + [16]


def test_a_group_computes_its_prompt_once_and_decodes_in_one_burst() -> None:
    engine = build_burst_engine()
    completions = generate_all(engine, build_prompts(22) * 8, Sampling(max_tokens=5))
    stats = engine.compute_stats()
    assert stats["engine/num_prefill_tokens"] == 22 + 7 * 2
    assert sorted(completion.num_cached_tokens for completion in completions) == [0] + [20] * 7
    assert len(get_decoder(engine).handles) == 1


def test_pausing_reads_the_burst_in_flight_and_later_tokens_use_the_new_weights() -> None:
    engine = build_burst_engine(decode_block=3)
    model = engine._runner.model
    sampling = Sampling(max_tokens=12, distribution=GREEDY)

    async def run() -> Completion:
        received: list[int] = []
        call = engine.generate(build_prompts(9)[0], sampling, on_tokens=lambda ids, _: received.extend(ids))
        task = asyncio.ensure_future(call)
        while not received and not task.done():
            await asyncio.sleep(0)
            await engine.generate([1], Sampling(max_tokens=1))
        if task.done():
            await task  # raises the error of a request that failed before it sampled a token
        engine.pause()
        assert all(handle.is_read for handle in get_decoder(engine).handles)
        assert not engine.has_work
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.7).add_(0.05)
        engine.resume(1)
        return await task

    completion = run_lockstep(run())
    num_old = completion.policy_versions.count(0)
    assert 0 < num_old < 12
    assert completion.policy_versions == (0,) * num_old + (1,) * (12 - num_old)
    ids = torch.tensor([[*build_prompts(9)[0], *completion.sampled_ids]])
    with torch.no_grad():
        expected = model(input_ids=ids).logits[0, 8 + num_old : -1].argmax(-1)
    assert list(completion.sampled_ids[num_old:]) == expected.tolist()


def test_only_the_row_with_non_finite_logits_fails_and_its_blocks_are_zeroed() -> None:
    engine = build_burst_engine(decode_block=4)
    with torch.no_grad():
        engine._runner.model.get_input_embeddings().weight[13] = torch.nan

    async def run(prompts: list[list[int]]) -> list[Completion | BaseException]:
        sampling = Sampling(max_tokens=6, distribution=GREEDY)
        return await asyncio.gather(*[engine.generate(p, sampling) for p in prompts], return_exceptions=True)

    good, bad, other = run_lockstep(run([[1, 2, 3], [4, 13, 5], [6, 7]]))
    assert isinstance(bad, EngineError)
    assert "are not finite" in str(bad)
    assert isinstance(good, Completion)
    assert isinstance(other, Completion)
    assert all(keys[:-1].isfinite().all() for keys in engine._runner.cache.keys)
    (after,) = run_lockstep(run([[1, 2, 3]]))
    assert isinstance(after, Completion)
    assert after.sampled_ids == good.sampled_ids


def test_requests_cancelled_in_flight_release_their_blocks() -> None:
    engine = build_burst_engine(decode_block=4, max_model_len=400)

    async def run() -> Completion:
        received = asyncio.Event()
        calls = [engine.generate([1, 2], Sampling(max_tokens=300), on_tokens=lambda *_: received.set())]
        calls += [engine.generate([3], Sampling(max_tokens=300))]
        leaving, staying = map(asyncio.ensure_future, calls)
        first_tokens = asyncio.ensure_future(received.wait())
        await asyncio.wait({first_tokens, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            await leaving  # raises the error of a request that failed before it sampled a token
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        return await staying

    completion = run_lockstep(run())
    (alone,) = generate_all(build_engine(max_model_len=400), [[3]], Sampling(max_tokens=300))
    assert completion.sampled_ids == alone.sampled_ids
    assert engine._output_processor.scheduler.pool.num_available == engine._runner.num_blocks
    run_lockstep(engine.generate([9], Sampling(max_tokens=1)))
    assert engine._output_processor.scheduler.pool.num_available == engine._runner.num_blocks
    assert not engine._output_processor.states


def test_a_failing_launch_is_raised_to_every_caller_and_the_engine_recovers() -> None:
    engine = build_burst_engine(decode_block=4)
    head = engine._runner.model.get_output_embeddings()

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    async def run() -> list[Completion | BaseException]:
        calls = [engine.generate(prompt, Sampling(max_tokens=6)) for prompt in build_prompts(3, 50, 7)]
        return await asyncio.gather(*calls, return_exceptions=True)

    hook = head.register_forward_hook(fail)
    failed = run_lockstep(run())
    assert all(isinstance(error, EngineError) and "lower engine.kv_cache_gib" in str(error) for error in failed)
    hook.remove()
    assert [len(dataclasses.asdict(whole)["sampled_ids"]) for whole in run_lockstep(run())] == [6] * 3


@pytest.mark.parametrize("is_biased", [(True, False, False), (False, True, False), (False, True, True)])
def test_prefilled_blocks_are_shared_with_requests_that_have_a_logit_bias(is_biased: tuple[bool, ...]) -> None:
    """Requests with a logit bias are computed in a separate forward."""
    prompt = build_prompts(22)[0]
    samplings = [
        Sampling(max_tokens=6, distribution=Distribution(temperature=0, logit_bias=((5, 0.5),) if biased else ()))
        for biased in is_biased
    ]

    async def run(engine: LocalEngine) -> list[Completion]:
        calls = [engine.generate(prompt, sampling, order=(i,)) for i, sampling in enumerate(samplings)]
        return await asyncio.gather(*calls)

    completions = run_lockstep(run(build_burst_engine()))
    for ours, theirs in zip(completions, run_lockstep(run(build_engine(has_prefix_cache=False))), strict=True):
        assert ours.sampled_ids == theirs.sampled_ids
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "lfm2"])
@pytest.mark.parametrize(
    ("has_penalty", "num_prefilled"),
    [((True,) * 8, 22 + 7 * 2), ((True, False, True, False), 2 * 22 + 2 * 2), ((False, True, True), 22 + 2 * 2)],
)
def test_requests_that_the_host_samples_share_the_prompt_of_a_step(name, has_penalty, num_prefilled) -> None:
    """A request that the device samples is prefilled before them, so it computes what it does not share with others
    of its kind."""
    penalties = [Distribution(frequency_penalty=0.7 * penalty) for penalty in has_penalty]
    samplings = [Sampling(max_tokens=6, distribution=each, seed=seed) for seed, each in enumerate(penalties)]

    async def run(engine: LocalEngine) -> list[Completion]:
        return await asyncio.gather(*(engine.generate(build_prompts(22)[0], each) for each in samplings))

    engine = build_burst_engine(name)
    completions = run_lockstep(run(engine))
    assert engine.compute_stats()["engine/num_prefill_tokens"] == num_prefilled
    for ours, theirs in zip(completions, run_lockstep(run(build_engine(name, has_prefix_cache=False))), strict=True):
        assert ours.sampled_ids == theirs.sampled_ids
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


def test_a_block_that_a_burst_completes_is_not_shared_before() -> None:
    first = build_prompts(32)[0]
    prompts = [first, [*first, 7, 8, 9]]
    sampling = Sampling(max_tokens=6, distribution=GREEDY)
    expected = generate_all(build_engine(has_prefix_cache=False), prompts, sampling)
    completions = generate_all(build_burst_engine(max_batched_tokens=31, page_size=4), prompts, sampling)
    for ours, theirs in zip(completions, expected, strict=True):
        assert ours.sampled_ids == theirs.sampled_ids
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


@pytest.mark.parametrize("burst_length", [3, 16])
def test_bursts_return_the_entropies_of_the_requests_that_ask_for_them(burst_length: int) -> None:
    prompts = build_prompts(3, 17, 30)
    asking = Sampling(max_tokens=20, distribution=Distribution(top_p=0.9), return_entropy=True)
    samplings = [asking, dataclasses.replace(asking, return_entropy=False), asking]
    received: list[float] = []

    def run(engine: LocalEngine) -> list[Completion]:
        def add(ids: list[int], _logprobs: list[float], details: TokenDetails) -> None:
            assert details.entropies is not None and len(details.entropies) == len(ids)
            received.extend(details.entropies)

        async def generate() -> list[Completion]:
            calls = zip(prompts, samplings, [None, None, add], strict=True)
            return await asyncio.gather(*(engine.generate(p, s, on_tokens=each) for p, s, each in calls))

        return run_lockstep(generate())

    expected, completions = run(build_engine()), run(build_burst_engine(decode_block=burst_length))
    assert strip(completions) == strip(expected)
    assert completions[1].entropies is None
    for index in (0, 2):
        ours, theirs = completions[index].entropies, expected[index].entropies
        assert ours is not None and theirs is not None and max(ours) > 0.5
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert completions[2].entropies == pytest.approx(received[20:], abs=1e-4)


def test_requests_with_top_logprobs_decode_beside_bursts() -> None:
    prompts = build_prompts(3, 17)
    sampling = Sampling(max_tokens=9, top_logprobs=3, return_entropy=True)
    expected = generate_all(build_engine(), prompts, sampling)
    completions = generate_all(build_burst_engine(), prompts, sampling)
    assert strip(completions) == strip(expected)
    for ours, theirs in zip(completions, expected, strict=True):
        assert ours.top_logprobs is not None and theirs.top_logprobs is not None and len(ours.top_logprobs) == 9
        for one, other in zip(ours.top_logprobs, theirs.top_logprobs, strict=True):
            assert [token_id for token_id, _ in one] == [token_id for token_id, _ in other]
            np.testing.assert_allclose([each for _, each in one], [each for _, each in other], atol=1e-4)


def test_requests_that_the_host_samples_keep_pace_with_bursts() -> None:
    prompts = build_prompts(3, 17, 30)
    distributions = [Distribution(), Distribution(frequency_penalty=0.7), Distribution()]

    def run(engine: LocalEngine) -> list[Completion]:
        async def generate() -> list[Completion]:
            samplings = [Sampling(max_tokens=40, distribution=each, seed=5) for each in distributions]
            return await asyncio.gather(*map(engine.generate, prompts, samplings))

        return run_lockstep(generate())

    engine = build_burst_engine(decode_block=8)
    assert strip(run(engine)) == strip(run(build_engine()))
    assert get_decoder(engine).num_single_steps == 39  # the first token is sampled from the prefill
    assert len(get_decoder(engine).handles) == 5
    assert engine.compute_stats()["engine/num_steps"] == 6
