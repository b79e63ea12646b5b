"""Where a completion ends inside a burst, and what its callers are told."""

from __future__ import annotations

import asyncio
import copy

import pytest

from engines import build_engine, build_prompts, generate_all
from host_bursts import build_burst_engine
from tiny_models import build_tiny
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.types import Completion, Sampling

PROMPT = build_prompts(3)[0]
NUM_TOKENS = 14


def build_ending(eos_ids: list[int], **settings: object) -> LocalEngine:
    """Bursts of four tokens, pages of four, and these end-of-sequence ids."""
    model = copy.deepcopy(build_tiny("llama"))
    use_plan_attention(model)
    model.generation_config.eos_token_id = eos_ids
    return build_burst_engine(model, decode_block=4, **settings)


def sample_all_tokens() -> tuple[int, ...]:
    (completion,) = generate_all(build_engine(), [PROMPT], Sampling(max_tokens=NUM_TOKENS))
    assert len(set(completion.sampled_ids)) == NUM_TOKENS
    return completion.sampled_ids


@pytest.mark.parametrize("num_tokens", range(1, NUM_TOKENS + 1))
def test_an_end_of_sequence_token_ends_it_wherever_it_stands_in_a_block(num_tokens: int) -> None:
    ids = sample_all_tokens()
    engine = build_ending([96, ids[num_tokens - 1]])
    (completion,) = generate_all(engine, [PROMPT], Sampling(max_tokens=NUM_TOKENS))
    assert completion.sampled_ids == ids[:num_tokens]
    assert completion.stop_reason == "eos"
    assert len(completion.logprobs) == len(completion.policy_versions) == num_tokens
    assert engine.compute_stats()["engine/num_sampled_tokens"] == num_tokens
    assert engine._output_processor.scheduler.pool.num_available == engine._runner.num_blocks


@pytest.mark.parametrize("max_tokens", [4, 5, 6, 8, 9, 13])
def test_ignored_end_of_sequence_tokens_end_nothing(max_tokens: int) -> None:
    ids = sample_all_tokens()
    (completion,) = generate_all(build_ending(list(ids)), [PROMPT], Sampling(max_tokens=max_tokens, ignore_eos=True))
    assert completion.sampled_ids == ids[:max_tokens]
    assert completion.stop_reason == "length"


@pytest.mark.parametrize("num_left", [1, 4, 5, 6, 9])
def test_the_models_context_ends_it_in_a_block(num_left: int) -> None:
    engine = build_ending([], max_model_len=len(PROMPT) + num_left)
    (completion,) = generate_all(engine, [PROMPT], Sampling(max_tokens=NUM_TOKENS))
    assert completion.sampled_ids == sample_all_tokens()[:num_left]
    assert completion.stop_reason == "context"


def test_rows_that_are_watched_and_rows_that_are_not_share_a_block() -> None:
    prompts = build_prompts(3, 24, 9, 30, 5, 12)
    samplings = [
        Sampling(max_tokens=30, seed=0),
        Sampling(max_tokens=21, seed=1),
        Sampling(max_tokens=25, seed=2, stop_token_ids=(3, 11, 54)),
        Sampling(max_tokens=17, seed=3),
        Sampling(max_tokens=25, seed=4, stop=("b",)),
        Sampling(max_tokens=2, seed=5),
    ]
    heard: list[list[int]] = [[] for _ in prompts]

    async def run(engine: LocalEngine, *, has_listeners: bool) -> list[Completion]:
        listeners = [lambda ids, _, row=row: heard[row].extend(ids) for row in range(len(prompts))]
        calls = [
            engine.generate(prompt, sampling, on_tokens=listeners[row] if has_listeners and row % 2 else None)
            for row, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
        ]
        return await asyncio.gather(*calls)

    expected = run_lockstep(run(build_engine(), has_listeners=False))
    engine = build_ending([], max_num_seqs=4)
    completions = run_lockstep(run(engine, has_listeners=True))
    for ours, theirs in zip(completions, expected, strict=True):
        assert (ours.sampled_ids, ours.stop_reason) == (theirs.sampled_ids, theirs.stop_reason)
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    assert heard == [list(ours.sampled_ids) if row % 2 else [] for row, ours in enumerate(completions)]
    num_sampled = sum(len(completion.sampled_ids) for completion in completions)
    assert engine.compute_stats()["engine/num_sampled_tokens"] == num_sampled


def test_an_agents_next_turn_finds_the_pages_that_blocks_have_filled() -> None:
    engine = build_ending([])
    (first,) = generate_all(engine, [PROMPT], Sampling(max_tokens=NUM_TOKENS))
    (second,) = generate_all(engine, [[*PROMPT, *first.sampled_ids, 5]], Sampling(max_tokens=3))
    assert second.num_cached_tokens == (len(PROMPT) + NUM_TOKENS - 1) // 4 * 4


def test_a_deadline_in_blocks_ends_a_request_with_all_that_was_read() -> None:
    engine = build_ending([], max_model_len=4000)
    heard: list[int] = []

    async def run() -> list[Completion]:
        sampling = Sampling(max_tokens=3900, deadline_s=0.3)
        calls = [engine.generate(PROMPT, sampling, on_tokens=lambda ids, _: heard.extend(ids))]
        calls += [engine.generate(PROMPT, sampling)]
        return await asyncio.gather(*calls)

    watched, unwatched = run_lockstep(run())
    assert watched.stop_reason == unwatched.stop_reason == "deadline"
    assert watched.sampled_ids == tuple(heard)
    num_both = min(len(watched.sampled_ids), len(unwatched.sampled_ids))
    assert num_both > 0
    assert watched.sampled_ids[:num_both] == unwatched.sampled_ids[:num_both]
