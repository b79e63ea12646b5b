"""Under any load each request gets the tokens that it gets alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import build_engine
from host_bursts import build_burst_engine
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.types import Completion, Distribution, Sampling

Build = Callable[..., LocalEngine]
PREFIXES = ((), (5, 6, 7, 8, 9), tuple(range(30, 47)))
DISTRIBUTIONS = (
    Distribution(), Distribution(temperature=0.8, top_p=0.9), Distribution(top_k=3), Distribution(presence_penalty=0.5)
)  # fmt: skip


@dataclass(frozen=True)
class Arrival:
    """A request, when it arrives and when it is cancelled."""

    prompt: tuple[int, ...]
    sampling: Sampling
    order: int
    num_steps_before: int
    cancel_after: int | None


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    tail = tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=20)))
    return Arrival(
        prompt=draw(st.sampled_from(PREFIXES)) + tail,
        sampling=Sampling(
            max_tokens=draw(st.integers(1, 15)),
            distribution=draw(st.sampled_from(DISTRIBUTIONS)),
            seed=draw(st.integers(0, 3)),
            stop_token_ids=(11,),
        ),
        order=draw(st.integers(0, 2)),
        num_steps_before=draw(st.sampled_from([0, 0, 0, 1, 5])),
        cancel_after=draw(st.sampled_from([None, None, None, 1, 4])),
    )


@cache
def build_reference_engine(name: str) -> LocalEngine:
    return build_engine(name, has_prefix_cache=False)


@cache
def generate_alone(name: str, prompt: tuple[int, ...], sampling: Sampling) -> Completion:
    return run_lockstep(build_reference_engine(name).generate(prompt, sampling))


@pytest.mark.parametrize("build", [build_engine, build_burst_engine])
@settings(max_examples=12)
@given(
    st.sampled_from(["llama", "lfm2", "qwen3_5"]),
    st.lists(arrivals(), min_size=1, max_size=10),
    st.fixed_dictionaries(
        {
            "page_size": st.sampled_from([1, 3, 8]),
            "kv_cache_tokens": st.sampled_from([48, 64, 150, 1000]),
            "max_num_seqs": st.sampled_from([1, 3, 16]),
            "max_batched_tokens": st.sampled_from([1, 7, 40, 400]),
            "has_prefix_cache": st.booleans(),
            "max_waiting": st.sampled_from([1, 100]),
            "decode_block": st.sampled_from([1, 4, 9]),
            "max_speculating_seqs": st.sampled_from([0, 2, 16]),
        }
    ),
)
def test_any_load_gives_the_tokens_of_each_request_alone(
    build: Build, name: str, load: list[Arrival], section: dict
) -> None:
    engine = build(name, **section)

    async def send(arrival: Arrival) -> tuple[list[int], Completion | None]:
        received: list[int] = []

        def take(token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
            received.extend(token_ids)
            if arrival.cancel_after is not None and len(received) >= arrival.cancel_after:
                task.cancel()

        if arrival.num_steps_before:
            await engine.generate([50, 51], Sampling(max_tokens=arrival.num_steps_before))
        task = asyncio.ensure_future(
            engine.generate(arrival.prompt, arrival.sampling, order=(arrival.order,), on_tokens=take)
        )
        await asyncio.wait([task])
        return received, None if task.cancelled() else task.result()

    async def run() -> list[tuple[list[int], Completion | None]]:
        results = await asyncio.gather(*map(send, load))
        await engine.generate([50], Sampling(max_tokens=1))  # one more step, which aborts the last cancelled request
        return results

    for arrival, (received, completion) in zip(load, run_lockstep(run()), strict=True):
        alone = generate_alone(name, arrival.prompt, arrival.sampling)
        if completion is None:
            assert len(received) >= (arrival.cancel_after or 0)
            assert received == list(alone.sampled_ids[: len(received)])
            continue
        assert tuple(received) == completion.sampled_ids
        if completion.stop_reason == "context":
            assert len(arrival.prompt) + len(received) >= section["kv_cache_tokens"]
            assert completion.sampled_ids == alone.sampled_ids[: len(received)]
        else:
            assert completion.sampled_ids == alone.sampled_ids
            assert completion.stop_reason == alone.stop_reason
            assert max(abs(a - b) for a, b in zip(completion.logprobs, alone.logprobs, strict=True)) < 1e-4
    assert not engine._output_processor.states
    assert not engine._output_processor.scheduler.has_requests
    assert engine._output_processor.scheduler.pool.num_available == engine._runner.num_blocks
