"""On a CUDA device entropies, top logprobs, penalties and grammars are those of a CPU, inside graphs and beside bursts.

Float32 models of two devices sample the same tokens from the same seeds, but for draws at a token's boundary.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
import torch

from tunesmith.config import EngineSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.experience.samples import build_samples
from tunesmith.grammar.grammars import build_json_grammar
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer
from tunesmith.trainer.batch import attach_token_masks
from tunesmith.trainer.packing import pack_samples
from tunesmith.trainer.scoring_pass import scatter_to_samples, score_tokens
from tunesmith.types import Completion, Distribution, Group, Sampling, Task, Trajectory, Turn

pytestmark = pytest.mark.gpu
TOKENIZER = build_pocket_tokenizer()
PROMPTS = [
    TOKENIZER.encode(text) for text in ("Ann has 3 apples.", "2 + 3 =", "How many coins does Leo have? " * 9)
] * 3
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PENALIZED = Distribution(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, top_p=0.95)
BANNED = Distribution(min_tokens=9, end_ids=(TOKENIZER.eos_token_id,), bad_words=((290,), (300, 301)))
PLAIN = Sampling(max_tokens=24, return_entropy=True, ignore_eos=True)
CASES = {
    "entropies": PLAIN,
    "truncated": Sampling(max_tokens=24, return_entropy=True, distribution=Distribution(top_k=20, temperature=1.3)),
    "top_logprobs": Sampling(max_tokens=24, return_entropy=True, top_logprobs=4),
    "penalties": Sampling(max_tokens=24, return_entropy=True, distribution=PENALIZED),
    "bans": Sampling(max_tokens=24, return_entropy=True, distribution=BANNED),
}


def build_engine(device: str, *, dtype: torch.dtype = torch.float32, **settings: object) -> LocalEngine:
    model = build_pocket_model(TOKENIZER).to(device=device, dtype=dtype)
    use_plan_attention(model)
    section = EngineSection(**({"kv_cache_tokens": 8192, "decode_block": 8} | settings))
    return LocalEngine(model, TOKENIZER, section, max_model_len=400)


def generate(engine: LocalEngine, samplings: list[Sampling]) -> list[Completion]:
    async def run() -> list[Completion]:
        return await asyncio.gather(*map(engine.generate, PROMPTS, samplings))

    return asyncio.run(run())


def seeded(sampling: Sampling) -> list[Sampling]:
    return [replace(sampling, seed=seed) for seed in range(len(PROMPTS))]


def assert_similar(ours: list[Completion], expected: list[Completion]) -> None:
    """Equal up to the first draw at a boundary; most completions are equal to the end."""
    num_equal = 0
    for one, other in zip(ours, expected, strict=True):
        pairs = enumerate(zip(one.sampled_ids, other.sampled_ids, strict=False))
        length = next((index for index, (a, b) in pairs if a != b), min(len(one.sampled_ids), len(other.sampled_ids)))
        num_equal += one.sampled_ids == other.sampled_ids
        torch.testing.assert_close(one.logprobs[:length], other.logprobs[:length], atol=2e-3, rtol=0)
        if one.entropies is not None and other.entropies is not None:
            torch.testing.assert_close(one.entropies[:length], other.entropies[:length], atol=2e-3, rtol=0)
        for tops, others in zip((one.top_logprobs or ())[:length], (other.top_logprobs or ())[:length], strict=True):
            torch.testing.assert_close([v for _, v in tops], [v for _, v in others], atol=2e-3, rtol=0)
    assert num_equal >= len(ours) - 2


@pytest.mark.parametrize("decode", ["compiled", "graphs", "eager"])
@pytest.mark.parametrize("case", CASES)
def test_completions_are_those_of_a_cpu(case: str, decode: str) -> None:
    samplings = seeded(CASES[case])
    assert_similar(
        generate(build_engine("cuda", cuda_decode=decode), samplings), generate(build_engine("cpu"), samplings)
    )


@pytest.mark.parametrize("decode", ["compiled", "graphs", "eager"])
def test_constrained_replies_are_valid_and_those_of_a_cpu(decode: str) -> None:
    pytest.importorskip("llguidance")
    constrained = Sampling(max_tokens=80, distribution=Distribution(grammar=build_json_grammar(SCHEMA)))
    samplings = [one if row % 2 else PLAIN for row, one in enumerate(seeded(constrained))]
    completions = generate(build_engine("cuda", cuda_decode=decode), samplings)
    assert_similar(completions, generate(build_engine("cpu"), samplings))
    for completion in completions[1::2]:
        if completion.stop_reason == "eos":
            assert json.loads(TOKENIZER.decode(completion.sampled_ids[:-1])).keys() == {"name", "age"}
    assert any(completion.stop_reason == "eos" for completion in completions[1::2])


def test_a_burst_without_entropies_is_sampled_from_the_same_graph_as_before() -> None:
    engine = build_engine("cuda", cuda_decode="graphs")
    first = generate(engine, seeded(Sampling(max_tokens=24, ignore_eos=True)))
    decoder = engine._runner._burst_decoder
    assert all(not has_entropies for _, _, has_entropies, _ in decoder._graphs)
    asked = generate(engine, seeded(PLAIN))
    assert {has_entropies for _, _, has_entropies, _ in decoder._graphs} == {True, False}
    assert [one.sampled_ids for one in first] == [one.sampled_ids for one in asked]
    assert first[0].entropies is None and asked[0].entropies is not None


def test_graphs_of_host_sampled_requests_follow_changed_weights() -> None:
    engine = build_engine("cuda", cuda_decode="compiled")
    samplings = seeded(CASES["penalties"])
    generate(engine, samplings)
    model = engine._runner.model
    engine.pause()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    engine.resume(1)
    other = build_engine("cpu")
    with torch.no_grad():
        for parameter in other._runner.model.parameters():
            parameter.mul_(1.05)
    other.resume(1)
    assert_similar(generate(engine, samplings), generate(other, samplings))


@pytest.mark.parametrize("case", ["penalties", "bans", "grammar"])
def test_the_trainer_scores_bfloat16_samples_under_their_distribution(case: str) -> None:
    distribution = PENALIZED if case == "penalties" else BANNED
    if case == "grammar":
        pytest.importorskip("llguidance")
        distribution = Distribution(grammar=build_json_grammar(SCHEMA))
    engine = build_engine("cuda", dtype=torch.bfloat16)
    completions = generate(engine, seeded(Sampling(max_tokens=40, distribution=distribution)))
    task = Task(task_id="t/0", index=0, row={})
    trajectories = [
        Trajectory(task=task, run_index=index, reward=0.0, turns=(Turn(
            prompt_ids=tuple(prompt), sampled_ids=one.sampled_ids, logprobs=one.logprobs,
            policy_versions=one.policy_versions, distribution=distribution, stop_reason=one.stop_reason,
        ),))
        for index, (prompt, one) in enumerate(zip(PROMPTS, completions, strict=True))
    ]  # fmt: skip
    group = Group(task=task, trajectories=tuple(trajectories))
    samples = attach_token_masks(build_samples([group], [[1.0] * len(trajectories)])[0], engine.grammars)
    model = engine._runner.model
    rows = pack_samples(samples, hidden_size=192, max_tokens_per_row=1000, has_prefix_sharing=True)
    logprobs_R, _ = score_tokens(model, samples, rows, chunk_tokens=64)
    errors = [
        abs(scored - sample.logprobs)[list(sample.is_sampled)].mean()
        for scored, sample in zip(scatter_to_samples(logprobs_R, samples, rows), samples, strict=True)
    ]
    assert max(errors) < 0.05
