"""Block decoding on the device: draws, graphs over changing batches, weights updated in place, compiled layers."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch

from tiny_models import build_tiny
from tunesmith.config import EngineSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.sampling import sample_tokens
from tunesmith.model.attention import use_plan_attention
from tunesmith.types import Distribution, Sampling

pytestmark = pytest.mark.gpu

GREEDY = Distribution(temperature=0.0)


def build_engine(model, **settings):
    section = EngineSection(**({"kv_cache_tokens": 16384, "cuda_decode": "graphs"} | settings))
    return LocalEngine(model, None, section, max_model_len=600)


def build_model(name="llama", dtype=torch.float32):
    model = copy.deepcopy(build_tiny(name)).to(device="cuda", dtype=dtype)
    use_plan_attention(model)
    return model


def generate(engine, prompts, samplings):
    async def run():
        calls = zip(prompts, samplings, strict=True)
        return await asyncio.gather(*[engine.generate(prompt, sampling) for prompt, sampling in calls])

    return asyncio.run(run())


def test_the_draw_kernel_draws_what_the_sampler_draws():
    from tunesmith.engine.kernels.draw import draw_tokens

    rows, vocabulary = 200, 50_003
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)).mul(3).cuda()
    temperatures = [0.0, 0.5, 1.0, 1.7] * (rows // 4)
    seeds, positions = list(range(rows)), list(range(5, rows + 5))
    expected = sample_tokens(logits.clone(), [Distribution(temperature=t) for t in temperatures], seeds, positions)
    ids = torch.zeros(rows, dtype=torch.long, device="cuda")
    at = torch.tensor(positions, device="cuda") - 1
    step = torch.zeros(1, dtype=torch.long, device="cuda")
    tokens, logprobs = torch.zeros((2, rows), dtype=torch.long, device="cuda"), torch.zeros((2, rows), device="cuda")
    draw_tokens(
        logits, temperatures_R=torch.tensor(temperatures, device="cuda"), seeds_R=torch.tensor(seeds, device="cuda"),
        positions_R=at, ids_R=ids, step=step, token_log_LR=tokens, logprob_log_LR=logprobs,
    )  # fmt: skip
    assert ids.tolist() == tokens[0].tolist() == expected.token_ids
    assert (at.tolist(), step.item()) == (positions, 1)
    torch.testing.assert_close(logprobs[0].cpu(), torch.tensor(expected.logprobs), atol=1e-4, rtol=0)


def test_long_contexts_are_split_and_reduced_to_the_same_tokens():
    prompts = [[5, 6, 7] * 170, [8]]
    samplings = [Sampling(max_tokens=40, distribution=GREEDY), Sampling(max_tokens=70, distribution=GREEDY)]
    model = build_model()
    for prompt, completion in zip(prompts, generate(build_engine(model), prompts, samplings), strict=True):
        ids = torch.tensor([[*prompt, *completion.sampled_ids]], device="cuda")
        with torch.no_grad():
            expected = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1).max(-1)
        assert list(completion.sampled_ids) == expected.indices.tolist()
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected.values.cpu(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("settings", [{"decode_block": 1}, {"decode_block": 7}, {"cuda_decode": "eager"}])
def test_tokens_do_not_depend_on_the_block_or_on_graphs(settings):
    model = build_model("qwen3")
    prompts = [[n, n + 1] for n in range(1, 20)]
    samplings = [Sampling(max_tokens=3 + 2 * n, seed=n) for n in range(1, 20)]
    plain = generate(build_engine(model), prompts, samplings)
    other = generate(build_engine(model, **settings), prompts, samplings)
    assert [c.sampled_ids for c in plain] == [c.sampled_ids for c in other]
    assert [len(c.sampled_ids) for c in plain] == [s.max_tokens for s in samplings]


def test_graphs_read_weights_that_are_updated_in_place():
    model = build_model()
    engine = build_engine(model)
    prompts, samplings = [[3, 4, 5]], [Sampling(max_tokens=24, distribution=GREEDY)]
    before = generate(engine, prompts, samplings)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    engine.pause()
    engine.resume(1)
    after = generate(engine, prompts, samplings)[0]
    ids = torch.tensor([[*prompts[0], *after.sampled_ids]], device="cuda")
    with torch.no_grad():
        expected = model(input_ids=ids).logits[0, len(prompts[0]) - 1 : -1].argmax(-1)
    assert list(after.sampled_ids) == expected.tolist()
    assert after.sampled_ids != before.sampled_ids
    assert set(after.policy_versions) == {1}


def test_compiled_layers_decode_the_same_tokens():
    model = build_model()
    prompts = [[n, n + 1, n + 2] for n in range(1, 12)]
    samplings = [Sampling(max_tokens=20, distribution=GREEDY)] * len(prompts)
    plain = generate(build_engine(model), prompts, samplings)
    compiled = generate(build_engine(model, cuda_decode="compiled"), prompts, samplings)
    assert [c.sampled_ids for c in plain] == [c.sampled_ids for c in compiled]


def test_a_request_whose_logits_are_not_finite_fails_alone():
    from tunesmith.errors import EngineError

    model = build_model()
    engine = build_engine(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[42] = float("nan")

    async def run():
        calls = [engine.generate([42, 1], Sampling(max_tokens=4)), engine.generate([1, 2], Sampling(max_tokens=4))]
        return await asyncio.gather(*calls, return_exceptions=True)

    broken, _ = asyncio.run(run())
    assert isinstance(broken, EngineError)
