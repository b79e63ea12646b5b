"""Requests that are unfinished when the weights change: their versions, logprobs and cache."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from conditions import HANG_S
from engines import build_engine, build_prompts, compute_reference_logits
from host_bursts import build_burst_engine
from tiny_models import build_tiny
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.types import Completion, Sampling

PROMPTS = build_prompts(9, 4, 21)
SAMPLING = Sampling(max_tokens=12)


@pytest.fixture(params=["one token a step", "bursts of three"])
def pair(request: pytest.FixtureRequest) -> tuple[LocalEngine, list[nn.Module]]:
    return build_pair(has_bursts=request.param == "bursts of three")


def build_pair(*, has_bursts: bool = False) -> tuple[LocalEngine, list[nn.Module]]:
    """An engine of a tiny model, and the model with its first and its second weights."""
    old = build_tiny("llama")
    new = copy.deepcopy(old)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    sampled = copy.deepcopy(old)
    use_plan_attention(sampled)
    engine = build_burst_engine(sampled, decode_block=3) if has_bursts else build_engine(sampled)
    return engine, [old, new]


def change_weights(engine: LocalEngine, new: nn.Module, *, keeps_cache: bool = False) -> None:
    engine.pause()
    with torch.no_grad():
        for parameter, value in zip(engine._runner.model.parameters(), new.parameters(), strict=True):
            parameter.copy_(value)
    engine.resume(1, keeps_cache=keeps_cache)


def run_changed(engine: LocalEngine, change: Callable[[], None], *, after: int = 5) -> list[Completion]:
    """Completions of all prompts, with a change of the weights once the first has this many tokens."""
    counts = dict.fromkeys(range(len(PROMPTS)), 0)

    async def run() -> list[Completion]:
        changed = asyncio.Event()

        def count(index: int, token_ids: object) -> None:
            counts[index] += len(token_ids)
            if counts[index] >= after:
                changed.set()

        async def watch() -> None:
            await changed.wait()
            change()

        watching = asyncio.create_task(watch())
        done = await asyncio.gather(
            *(
                engine.generate(prompt, SAMPLING, order=(index,), on_tokens=lambda ids, _, i=index: count(i, ids))
                for index, prompt in enumerate(PROMPTS)
            )
        )
        await watching
        return done

    return run_lockstep(run())


def compute_logprobs(model: nn.Module, prompt: list[int], completion: Completion) -> torch.Tensor:
    logits = compute_reference_logits(model, prompt, completion.sampled_ids)
    return logits.log_softmax(-1).gather(1, torch.tensor(completion.sampled_ids)[:, None])[:, 0]


def test_each_token_has_the_logprob_of_the_weights_of_its_version(pair):
    engine, models = pair
    for prompt, completion in zip(PROMPTS, run_changed(engine, lambda: change_weights(engine, models[1])), strict=True):
        versions = torch.tensor(completion.policy_versions)
        assert versions.tolist() == sorted(versions.tolist()) and set(versions.tolist()) == {0, 1}
        both = torch.stack([compute_logprobs(model, prompt, completion) for model in models])
        expected = both.gather(0, versions[None])[0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)
        assert (both[0] - both[1]).abs().max() > 0.05, "the weights of the versions differ"


def test_recomputed_requests_continue_as_a_fresh_prefill_does(pair):
    engine, models = pair
    changed = run_changed(engine, lambda: change_weights(engine, models[1]))
    fresh = copy.deepcopy(models[1])
    use_plan_attention(fresh)
    for prompt, completion in zip(PROMPTS, changed, strict=True):
        num_old = completion.policy_versions.index(1)
        start = [*prompt, *completion.sampled_ids[:num_old]]
        rest = run_lockstep(build_engine(fresh).generate(start, Sampling(max_tokens=SAMPLING.max_tokens - num_old)))
        assert rest.sampled_ids == completion.sampled_ids[num_old:]
        assert rest.logprobs == pytest.approx(completion.logprobs[num_old:], abs=1e-5)


def test_a_kept_cache_is_marked_with_its_version_and_no_other_request_reads_it(pair):
    engine, models = pair
    found: list[Completion] = []

    async def run() -> None:
        first = asyncio.Event()
        kept = asyncio.ensure_future(
            engine.generate(PROMPTS[2], SAMPLING, order=(0,), on_tokens=lambda ids, _: first.set())
        )
        await first.wait()
        change_weights(engine, models[1], keeps_cache=True)
        found.append(await engine.generate(PROMPTS[2], SAMPLING, order=(1,)))
        found.append(await kept)

    run_lockstep(run())
    later, kept = found
    assert set(later.policy_versions) == {1} and set(kept.policy_versions) == {0}
    expected = compute_logprobs(models[1], PROMPTS[2], later)
    torch.testing.assert_close(torch.tensor(later.logprobs), expected, atol=1e-5, rtol=0)
    mixed = torch.tensor(kept.logprobs)
    assert all((mixed - compute_logprobs(model, PROMPTS[2], kept)).abs().max() > 1e-3 for model in models)


def test_a_kept_request_that_is_preempted_is_computed_again(pair):
    engine, models = pair

    def change() -> None:
        change_weights(engine, models[1], keeps_cache=True)
        scheduler = engine._output_processor.scheduler
        scheduler._preempt(scheduler.running[-1])

    *kept, preempted = run_changed(engine, change)
    assert all(set(completion.policy_versions) == {0} for completion in kept)
    versions = torch.tensor(preempted.policy_versions)
    assert set(versions.tolist()) == {0, 1}
    both = torch.stack([compute_logprobs(model, PROMPTS[-1], preempted) for model in models])
    torch.testing.assert_close(torch.tensor(preempted.logprobs), both.gather(0, versions[None])[0], atol=1e-5, rtol=0)


def test_held_requests_wait_while_others_are_sampled(pair):
    engine, _ = pair
    expected = run_changed(build_pair()[0], lambda: None)
    order: list[str] = []

    async def run() -> list[Completion]:
        first = asyncio.Event()

        async def sample(index: int) -> Completion:
            done = await engine.generate(PROMPTS[index], SAMPLING, order=(index,), on_tokens=lambda ids, _: first.set())
            order.append(f"held {index}")
            return done

        held = asyncio.gather(*map(sample, range(len(PROMPTS))))
        await first.wait()
        engine.hold()
        engine.resume(0)
        await engine.generate(PROMPTS[0], SAMPLING)
        order.append("other")
        engine.release()
        engine.resume(0)
        return await held

    completions = run_lockstep(run())
    assert order[0] == "other" and len(order) == 4
    assert [c.sampled_ids for c in completions] == [c.sampled_ids for c in expected]


def test_a_held_request_can_be_cancelled(pair):
    engine, _ = pair

    async def run() -> None:
        first = asyncio.Event()
        held = asyncio.ensure_future(engine.generate(PROMPTS[0], SAMPLING, on_tokens=lambda ids, _: first.set()))
        await first.wait()
        engine.hold()
        engine.resume(0)
        held.cancel()
        await engine.generate(PROMPTS[1], SAMPLING)
        engine.release()
        engine.resume(0)
        with pytest.raises(asyncio.CancelledError):
            await held
        await engine.generate(PROMPTS[1], SAMPLING)

    run_lockstep(run())
    assert not engine.has_work


@pytest.mark.parametrize("build", [build_engine, build_burst_engine])
def test_held_requests_leave_their_places_in_the_queue_to_others(build):
    """Of five callers one request runs, two are queued, and two callers wait for a place."""
    engine = build(max_waiting=2, max_num_seqs=1, decode_block=3)
    sampling = Sampling(max_tokens=40)
    ended: list[str] = []

    async def sample(name: str, index: int, on_tokens: Callable | None = None) -> Completion:
        done = await engine.generate(PROMPTS[index % 3], sampling, order=(index,), on_tokens=on_tokens)
        ended.append(name)
        return done

    async def run() -> list[Completion | BaseException]:
        first = asyncio.Event()
        old = [asyncio.ensure_future(sample("old", index, lambda ids, _: first.set())) for index in range(5)]
        await first.wait()
        engine.hold()
        engine.resume(0)
        old[2].cancel()  # has a request
        old[4].cancel()  # has none
        new = asyncio.gather(*(sample("new", index) for index in range(4)))
        await asyncio.wait_for(new, HANG_S)
        engine.release()
        engine.resume(0)
        return await asyncio.gather(*old, return_exceptions=True)

    completions = run_lockstep(run())
    assert ended == ["new"] * 4 + ["old"] * 3
    expected = run_lockstep(asyncio.wait_for(engine.generate(PROMPTS[0], sampling), HANG_S))
    assert [isinstance(each, Completion) for each in completions] == [True, True, False, True, False]
    assert completions[0].sampled_ids == completions[3].sampled_ids == expected.sampled_ids
    assert engine.compute_stats()["engine/num_requests"] == 8
    assert engine._queue_places._value == 2


def test_tokens_arrive_while_the_engine_has_the_version_that_sampled_them(pair):
    """A cancelled call is recorded from what arrived, so the version at arrival must be the token's."""
    engine, models = pair
    seen: list[int] = []

    async def run() -> Completion:
        first = asyncio.Event()

        def note(token_ids: object, _: object) -> None:
            seen.extend([engine.policy_version] * len(token_ids))
            first.set()

        running = asyncio.ensure_future(engine.generate(PROMPTS[0], SAMPLING, on_tokens=note))
        await first.wait()
        engine.step()  # its token is not delivered yet
        change_weights(engine, models[1])
        return await running

    completion = run_lockstep(run())
    assert tuple(seen) == completion.policy_versions and set(seen) == {0, 1}
