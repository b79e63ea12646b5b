"""Where a completion ends within a burst, and which tokens its callers receive."""

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


def build_engine_with_eos(eos_ids: list[int], **settings: object) -> LocalEngine:
    """Bursts of four tokens, blocks of four slots, and these end-of-sequence ids."""
    model = copy.deepcopy(build_tiny("llama"))
    use_plan_attention(model)
    model.generation_config.eos_token_id = eos_ids
    return build_burst_engine(model, decode_block=4, **settings)


def sample_all_tokens() -> tuple[int, ...]:
    (completion,) = generate_all(build_engine(), [PROMPT], Sampling(max_tokens=NUM_TOKENS))
    assert len(set(completion.sampled_ids)) == NUM_TOKENS
    return completion.sampled_ids


@pytest.mark.parametrize("num_tokens", range(1, NUM_TOKENS + 1))
def test_an_eos_token_ends_a_completion_at_any_position_of_a_burst(num_tokens: int) -> None:
    ids = sample_all_tokens()
    engine = build_engine_with_eos([96, ids[num_tokens - 1]])
    (completion,) = generate_all(engine, [PROMPT], Sampling(max_tokens=NUM_TOKENS))
    assert completion.sampled_ids == ids[:num_tokens]
    assert completion.stop_reason == "eos"
    assert len(completion.logprobs) == len(completion.policy_versions) == num_tokens
    assert engine.compute_stats()["engine/num_sampled_tokens"] == num_tokens
    assert engine._output_processor.scheduler.pool.num_available == engine._runner.num_blocks


@pytest.mark.parametrize("max_tokens", [4, 5, 6, 8, 9, 13])
def test_ignored_eos_tokens_do_not_end_a_completion(max_tokens: int) -> None:
    ids = sample_all_tokens()
    (completion,) = generate_all(
        build_engine_with_eos(list(ids)), [PROMPT], Sampling(max_tokens=max_tokens, ignore_eos=True)
    )
    assert completion.sampled_ids == ids[:max_tokens]
    assert completion.stop_reason == "length"


@pytest.mark.parametrize("num_left", [1, 4, 5, 6, 9])
def test_the_models_context_ends_a_completion_within_a_burst(num_left: int) -> None:
    engine = build_engine_with_eos([], max_model_len=len(PROMPT) + num_left)
    (completion,) = generate_all(engine, [PROMPT], Sampling(max_tokens=NUM_TOKENS))
    assert completion.sampled_ids == sample_all_tokens()[:num_left]
    assert completion.stop_reason == "context"


def test_rows_with_and_without_stops_and_callbacks_share_a_burst() -> None:
    prompts = build_prompts(3, 24, 9, 30, 5, 12)
    samplings = [
        Sampling(max_tokens=30, seed=0),
        Sampling(max_tokens=21, seed=1),
        Sampling(max_tokens=25, seed=2, stop_token_ids=(3, 11, 54)),
        Sampling(max_tokens=17, seed=3),
        Sampling(max_tokens=25, seed=4, stop=("b",)),
        Sampling(max_tokens=2, seed=5),
    ]
    received: list[list[int]] = [[] for _ in prompts]

    async def run(engine: LocalEngine, *, has_callbacks: bool) -> list[Completion]:
        callbacks = [lambda ids, _, row=row: received[row].extend(ids) for row in range(len(prompts))]
        calls = [
            engine.generate(prompt, sampling, on_tokens=callbacks[row] if has_callbacks and row % 2 else None)
            for row, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
        ]
        return await asyncio.gather(*calls)

    expected = run_lockstep(run(build_engine(), has_callbacks=False))
    engine = build_engine_with_eos([], max_num_seqs=4)
    completions = run_lockstep(run(engine, has_callbacks=True))
    for ours, theirs in zip(completions, expected, strict=True):
        assert (ours.sampled_ids, ours.stop_reason) == (theirs.sampled_ids, theirs.stop_reason)
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    assert received == [list(ours.sampled_ids) if row % 2 else [] for row, ours in enumerate(completions)]
    num_sampled = sum(len(completion.sampled_ids) for completion in completions)
    assert engine.compute_stats()["engine/num_sampled_tokens"] == num_sampled


def test_the_next_turn_of_a_conversation_reuses_the_blocks_filled_by_bursts() -> None:
    engine = build_engine_with_eos([])
    (first,) = generate_all(engine, [PROMPT], Sampling(max_tokens=NUM_TOKENS))
    (second,) = generate_all(engine, [[*PROMPT, *first.sampled_ids, 5]], Sampling(max_tokens=3))
    assert second.num_cached_tokens == (len(PROMPT) + NUM_TOKENS - 1) // 4 * 4
