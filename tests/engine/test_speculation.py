"""Speculation changes how many steps a reply takes, and nothing else."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from engines import build_engine, build_prompts, compute_reference_logits
from host_bursts import build_burst_engine
from tiny_models import SIZES
from tunesmith.config import EngineSection
from tunesmith.engine.core.drafts import CPU_COST
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.types import Completion, Distribution, Sampling

Build = Callable[..., LocalEngine]
BUILDS = pytest.mark.parametrize("build", [build_engine, build_burst_engine])
FEW = Distribution(temperature=0.9, logit_bias=tuple((token_id, 20.0) for token_id in (5, 6, 7)))
"""Three tokens: most n-grams have occurred before, and what follows them often differs."""


@pytest.fixture(autouse=True)
def _cheap_verifying(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the costs of a GPU such short replies would be sampled without drafts."""
    monkeypatch.setattr("tunesmith.engine.engine.CUDA_COST", CPU_COST)


def run_turns(engine: LocalEngine, turns: Sequence[Sequence[tuple[list[int], Sampling]]]) -> list[Completion]:
    """One turn after the other; the requests of a turn run at once, the index of their place is their group."""

    async def run() -> list[Completion]:
        completions = []
        for turn in turns:
            calls = [engine.generate(prompt, sampling, order=(place,)) for place, (prompt, sampling) in enumerate(turn)]
            completions += await asyncio.gather(*calls)
        return completions

    return run_lockstep(run())


@pytest.mark.parametrize(
    ("build", "name"),
    [(build_engine, "llama"), (build_engine, "gemma2"), (build_engine, "qwen3"), (build_burst_engine, "llama")],
)
def test_tokens_and_logprobs_are_those_without_speculation(build: Build, name: str) -> None:
    prompts = build_prompts(7, 20, 3)
    samplings = [
        Sampling(max_tokens=60, distribution=FEW, seed=1, return_entropy=True, top_logprobs=3),
        Sampling(max_tokens=50, distribution=Distribution(temperature=0.0), seed=2),
        Sampling(max_tokens=40, distribution=Distribution(temperature=0.4, top_p=0.9), seed=3, return_entropy=True),
    ]
    turns = [list(zip(prompts, samplings, strict=True))] * 2  # the second time a finished reply shows every token
    expected = run_turns(build(name), turns)
    engine = build(name, max_speculating_seqs=8, decode_block=4)
    completions = run_turns(engine, turns)
    stats = engine.compute_stats()
    assert 0 < stats["engine/num_accepted_tokens"] < stats["engine/num_drafted_tokens"]
    assert stats["engine/num_sampled_tokens"] == 2 * (60 + 50 + 40)
    for ours, theirs in zip(completions, expected, strict=True):
        assert (ours.sampled_ids, ours.stop_reason) == (theirs.sampled_ids, theirs.stop_reason)
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert (ours.entropies is None) == (theirs.entropies is None)
        assert ours.entropies is None or ours.entropies == pytest.approx(theirs.entropies, abs=1e-3)
        if theirs.top_logprobs is not None:
            ids = [[[token_id for token_id, _ in each] for each in of.top_logprobs] for of in (ours, theirs)]
            assert ids[0] == ids[1]


def test_the_group_finished_reply_is_verified_in_a_few_steps() -> None:
    (prompt,) = build_prompts(9)
    sampling = Sampling(max_tokens=64, seed=3)

    def count_steps(*, max_speculating_seqs: int, second_group: int) -> tuple[float, Completion]:
        engine = build_engine(max_speculating_seqs=max_speculating_seqs)

        async def run() -> Completion:
            await engine.generate(prompt, sampling, order=(0, 0))
            engine.compute_stats()
            return await engine.generate(prompt, sampling, order=(second_group, 1))

        completion = run_lockstep(run())
        return engine.compute_stats()["engine/num_steps"], completion

    num_plain, plain = count_steps(max_speculating_seqs=0, second_group=0)
    num_other, _ = count_steps(max_speculating_seqs=1, second_group=1)
    num_steps, completion = count_steps(max_speculating_seqs=1, second_group=0)
    assert num_plain == 64 and num_other > 55
    assert num_steps < 20
    assert completion.sampled_ids == plain.sampled_ids


@BUILDS
@pytest.mark.parametrize("num_kept", [1, 2, 6, 20, 30])
def test_a_reply_ends_within_a_draft_where_it_ends_without(build: Build, num_kept: int) -> None:
    (prompt,), received = build_prompts(9), []
    engine = build(max_speculating_seqs=2, decode_block=3)

    async def run(stops: dict[str, tuple]) -> Completion:
        engine.compute_stats()
        sampling = Sampling(max_tokens=40, seed=3, **stops)
        return await engine.generate(prompt, sampling, on_tokens=lambda ids, _: received.extend(ids))

    whole = run_lockstep(run({}))
    assert len(set(whole.sampled_ids)) > 10
    end = whole.sampled_ids[num_kept - 1]
    first = whole.sampled_ids.index(end) + 1
    received.clear()
    stopped = run_lockstep(run({"stop_token_ids": (end,)}))
    assert stopped.sampled_ids == whole.sampled_ids[:first] == tuple(received)
    assert stopped.stop_reason == "stop"
    assert stopped.logprobs == pytest.approx(whole.logprobs[:first], abs=1e-4)
    stats = engine.compute_stats()
    assert stats["engine/num_sampled_tokens"] == first
    assert first < 18 or stats["engine/num_accepted_tokens"] > 0
    pool = engine._output_processor.scheduler.pool
    assert pool.num_available == engine._runner.num_blocks


def test_the_next_turn_finds_the_keys_of_accepted_tokens_and_none_of_rejected_ones() -> None:
    """Keys and values of a rejected draft in a full block would change the tokens of the next turn."""
    (prompt,), sampling = build_prompts(9), Sampling(max_tokens=50, seed=1, distribution=FEW)
    engine, plain = build_engine(max_speculating_seqs=2), build_engine(has_prefix_cache=False)
    for _ in range(3):
        (ours,), (theirs,) = (run_turns(each, [[(prompt, sampling)]]) for each in (engine, plain))
        assert ours.sampled_ids == theirs.sampled_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        prompt = [*prompt, *ours.sampled_ids, 5]
        assert ours.num_cached_tokens == 0 or ours.num_cached_tokens > len(ours.sampled_ids)
        sampling = Sampling(max_tokens=20, seed=2, distribution=FEW)
    assert engine.compute_stats()["engine/num_accepted_tokens"] > 0


def test_replies_with_drafts_have_the_exact_distribution() -> None:
    """All 64 replies of three tokens over a vocabulary of four, against their exact probabilities."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = SIZES | {"vocab_size": 4, "num_hidden_layers": 1}
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), attn_implementation="eager").eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.25)
    prompt, num_replies, num_at_once = [0, 1, 2, 3], 1200, 4
    use_plan_attention(model)
    settings = EngineSection(kv_cache_tokens=400, max_speculating_seqs=num_at_once)
    engine = LocalEngine(model, None, settings, max_model_len=16)

    async def run() -> list[Completion]:
        completions = []
        for first in range(0, num_replies, num_at_once):
            samplings = [Sampling(max_tokens=3, seed=seed) for seed in range(first, first + num_at_once)]
            completions += await asyncio.gather(*(engine.generate(prompt, each) for each in samplings))
        return completions

    counts = Counter(completion.sampled_ids for completion in run_lockstep(run()))
    stats = engine.compute_stats()
    assert stats["engine/num_accepted_tokens"] > 200
    assert stats["engine/num_drafted_tokens"] > stats["engine/num_accepted_tokens"] + 200
    chi_square = 0.0
    for reply in itertools.product(range(4), repeat=3):
        logprobs = compute_reference_logits(model, prompt, reply).log_softmax(-1)
        expected = num_replies * logprobs.gather(1, torch.tensor(reply)[:, None]).sum().exp().item()
        chi_square += (counts[reply] - expected) ** 2 / expected
    assert chi_square < 103.4  # 99.9 % of 63 degrees of freedom
