"""Prefills as CUDA graphs: the tokens and logprobs of prefills without graphs, for any lengths and cached prefixes."""

from __future__ import annotations

import asyncio
import copy
from itertools import chain
from typing import Any

import pytest
import torch

from tiny_models import build_tiny
from tunesmith.config import EngineSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.types import Completion, Distribution, Sampling

pytestmark = pytest.mark.gpu

GREEDY = Sampling(max_tokens=5, distribution=Distribution(temperature=0.0))
NUM_TURNS = 3


def build_model(name: str) -> Any:
    model = copy.deepcopy(build_tiny(name)).to(device="cuda", dtype=torch.float32)
    use_plan_attention(model)
    return model


def run_conversations(model: Any, lengths: list[int], **settings: Any) -> list[list[Completion]]:
    """Conversations of several turns, each longer than the one before, so that prefixes are cached."""
    section = EngineSection(kv_cache_tokens=2**15, max_num_seqs=len(lengths), **settings)
    engine = LocalEngine(model, None, section, max_model_len=800)

    async def act(index: int, length: int) -> list[Completion]:
        prompt, turns = [(7 * index + place) % 90 + 1 for place in range(length)], []
        for turn in range(NUM_TURNS):
            turns.append(await engine.generate(prompt, GREEDY))
            prompt = [*prompt, *turns[-1].sampled_ids, *range(1, 2 + 3 * turn + index)]
        return turns

    async def run() -> list[list[Completion]]:
        return await asyncio.gather(*(act(*each) for each in enumerate(lengths)))

    return asyncio.run(run())


@pytest.mark.parametrize("mode", ["graphs", "compiled"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2"])
@pytest.mark.parametrize("max_batched_tokens", [None, 48], ids=["one forward", "several forwards"])
def test_prefills_as_graphs_sample_the_same_tokens(
    name: str, mode: str, max_batched_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tunesmith.engine.cuda.forward_graphs import PrefillGraphs

    model, lengths = build_model(name), [1, 2, 15, 16, 17, 33, 64, 100, 257, 400]
    settings = {"cuda_decode": mode, "max_batched_tokens": max_batched_tokens}
    compute, num_tokens = PrefillGraphs.compute, []

    def count(self: PrefillGraphs, spans: Any, token_ids: Any, last_tokens: Any) -> torch.Tensor:
        num_tokens.append(len(token_ids))
        return compute(self, spans, token_ids, last_tokens)

    monkeypatch.setattr(PrefillGraphs, "compute", count)
    graphs = run_conversations(model, lengths, **settings)
    assert len(num_tokens) >= NUM_TURNS
    assert len(set(num_tokens)) > 1
    monkeypatch.setattr(PrefillGraphs, "can_compute", lambda *_: False)
    plain = run_conversations(model, lengths, **settings)
    for ours, theirs in zip(chain.from_iterable(graphs), chain.from_iterable(plain), strict=True):
        assert ours.sampled_ids == theirs.sampled_ids
        torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-4, rtol=0)


def test_larger_models_have_graphs_of_fewer_tokens() -> None:
    from tunesmith.engine.cuda.forward_graphs import CAPTURE_TOKENS, find_max_tokens

    limits = [find_max_tokens(int(size)) for size in (1e6, 0.6e9, 1.5e9, 7e9, 32e9, 1e12)]
    assert limits == [4096, 4096, 2048, 512, 96, CAPTURE_TOKENS[0]]
