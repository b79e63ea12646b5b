"""Tokens that the engine keeps until they are asked for: copies of a running and of a cancelled request."""

from __future__ import annotations

import asyncio

import pytest

from engines import build_engine
from host_bursts import build_burst_engine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.types import Completion, DeferredTokens, Sampling

PROMPT, SAMPLING = [5, 6, 7], Sampling(max_tokens=40, seed=3, ignore_eos=True, return_entropy=True)


def refuse(*tokens: object) -> None:
    raise AssertionError("the engine keeps the tokens")


@pytest.mark.parametrize("build", [build_engine, build_burst_engine])
def test_tokens_so_far_are_read_without_a_callback(build) -> None:
    engine = build(max_num_seqs=4, kv_cache_tokens=1000, decode_block=4)
    deferred = DeferredTokens(refuse)

    async def run() -> tuple[list[Completion], Completion]:
        task = asyncio.ensure_future(engine.generate(PROMPT, SAMPLING, order=(0,), on_tokens=deferred))
        copies = []
        for _ in range(3):
            await engine.generate([50, 51], Sampling(max_tokens=6, ignore_eos=True), order=(1,))
            copies.append(deferred.read())
        task.cancel()
        await asyncio.wait([task])
        copies.append(deferred.read())
        await engine.generate([50], Sampling(max_tokens=1), order=(1,))  # a step, which aborts the cancelled request
        copies.append(deferred.read())
        return copies, await engine.generate(PROMPT, SAMPLING, order=(0,), on_tokens=DeferredTokens(refuse))

    copies, whole = run_lockstep(run())
    lengths = [len(copy.sampled_ids) for copy in copies]
    assert 0 < lengths[0] < lengths[1] < lengths[2] <= lengths[3] <= lengths[4] < len(whole.sampled_ids) == 40
    for copy, length in zip(copies, lengths, strict=True):
        assert copy.stop_reason == "cancelled"
        assert copy.sampled_ids == whole.sampled_ids[:length]
        assert copy.logprobs == pytest.approx(whole.logprobs[:length], abs=1e-4)
        assert copy.entropies == pytest.approx(whole.entropies[:length], abs=1e-4)
        assert copy.policy_versions == (0,) * length
