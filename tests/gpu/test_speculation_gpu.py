"""On a CUDA device a reply with drafts is the reply without, through bursts, prefill graphs and fused layers."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import torch

from tiny_models import build_tiny
from tunesmith.config import EngineSection
from tunesmith.engine.core.drafts import CPU_COST
from tunesmith.engine.engine import LocalEngine
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.types import Completion, Distribution, Sampling

pytestmark = pytest.mark.gpu
PROMPTS = [[(7 * index + place) % 90 + 1 for place in range(length)] for index, length in enumerate((9, 33, 70))]
DISTRIBUTIONS = [
    Distribution(temperature=0.0),
    Distribution(temperature=0.5, top_p=0.9),
    Distribution(temperature=0.9, logit_bias=tuple((token_id, 20.0) for token_id in (5, 6, 7))),  # the host samples it
]


@pytest.fixture(autouse=True)
def _cheap_verifying(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the costs of a GPU such short replies would be sampled without drafts."""
    monkeypatch.setattr("tunesmith.engine.engine.CUDA_COST", CPU_COST)


def sample_twice(model: Any, num_speculating: int, **settings: Any) -> tuple[list[Completion], dict[str, float]]:
    """Three requests of different distributions, and the same once more: the first replies are drafts of the second."""
    section = EngineSection(kv_cache_tokens=4096, decode_block=8, max_speculating_seqs=num_speculating, **settings)
    engine = LocalEngine(model, None, section, max_model_len=400)

    async def run() -> list[Completion]:
        completions = []
        for _ in range(2):
            calls = [
                engine.generate(
                    prompt,
                    Sampling(max_tokens=120, distribution=distribution, seed=index, return_entropy=True),
                    order=(index,),
                )
                for index, (prompt, distribution) in enumerate(zip(PROMPTS, DISTRIBUTIONS, strict=True))
            ]
            completions += await asyncio.gather(*calls)
        return completions

    return asyncio.run(run()), engine.compute_stats()


@pytest.mark.parametrize("mode", ["eager", "graphs", "compiled"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2"])
def test_tokens_and_logprobs_are_those_without_speculation(name: str, mode: str) -> None:
    model = copy.deepcopy(build_tiny(name)).to(device="cuda", dtype=torch.float32)
    use_plan_attention(model)
    expected, _ = sample_twice(model, 0, cuda_decode=mode)
    completions, stats = sample_twice(model, 4, cuda_decode=mode)
    assert stats["engine/num_accepted_tokens"] > 0
    for ours, theirs in zip(completions, expected, strict=True):
        assert (ours.sampled_ids, ours.stop_reason) == (theirs.sampled_ids, theirs.stop_reason)
        torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.tensor(ours.entropies), torch.tensor(theirs.entropies), atol=1e-3, rtol=0)


def test_forwards_of_few_tokens_change_no_token() -> None:
    model = copy.deepcopy(build_tiny("llama")).to(device="cuda", dtype=torch.float32)
    use_plan_attention(model)
    expected, _ = sample_twice(model, 0)
    completions, _ = sample_twice(model, 4, max_batched_tokens=11)
    assert [each.sampled_ids for each in completions] == [each.sampled_ids for each in expected]
