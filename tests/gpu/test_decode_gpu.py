"""Decoding in bursts on a CUDA device: kernels, graphs over changing batches, changed weights, fused layers, errors."""

from __future__ import annotations

import asyncio
import copy
import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from tiny_models import build_tiny
from tunesmith.config import EngineSection
from tunesmith.engine.batch.sampler import sample_tokens
from tunesmith.engine.engine import LocalEngine
from tunesmith.errors import EngineError
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.model.kernels.prologue import Prologue
from tunesmith.types import Distribution, Sampling

pytestmark = pytest.mark.gpu

GREEDY = Distribution(temperature=0.0)
PLAIN = [Distribution(temperature=temperature) for temperature in (0.0, 0.5, 1.0, 1.7)]
TRUNCATED = [
    Distribution(top_k=5),
    Distribution(top_p=0.8),
    Distribution(min_p=0.2),
    Distribution(temperature=1.3, top_k=50, top_p=0.9, min_p=0.01),
    Distribution(temperature=0.0, top_k=3),
    Distribution(),
]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("distributions", [PLAIN, TRUNCATED])
def test_the_sampling_kernel_samples_the_tokens_of_the_sampler(distributions, dtype):
    from tunesmith.engine.cuda.kernels.sample import SamplingTensors, sample_next_tokens

    num_rows, vocabulary = 180, 50_003
    logits = torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    chosen = [distributions[row % len(distributions)] for row in range(num_rows)]
    seeds, positions = list(range(num_rows)), list(range(5, num_rows + 5))
    expected = sample_tokens(  # overwrites its logits
        logits.float().clone(), chosen, seeds, positions, has_entropies=True
    )

    def put(values, kind=None):
        return torch.tensor(values, dtype=kind, device="cuda")

    rows = SamplingTensors(
        ids_R=put([0] * num_rows),
        positions_R=put(positions) - 1,
        seeds_R=put(seeds),
        temperatures_R=put([d.temperature for d in chosen]),
        top_ks_R=put([d.top_k for d in chosen]),
        top_ps_R=put([d.top_p for d in chosen]),
        min_ps_R=put([d.min_p for d in chosen]),
        log_lines_R=1 - put(positions),
        token_log_LR=put([[-1] * num_rows] * 3, torch.int32),
        logprob_log_LR=put([[math.nan] * num_rows] * 3),
        entropy_log_LR=put([[math.nan] * num_rows] * 3),
    )
    sample_next_tokens(logits.cuda(), rows, has_truncation=distributions is TRUNCATED, has_entropies=True)
    assert rows.ids_R.tolist() == rows.token_log_LR[1].tolist()
    assert rows.positions_R.tolist() == positions
    assert rows.token_log_LR[[0, 2]].unique().tolist() == [-1]
    is_same = rows.ids_R.cpu() == torch.tensor(expected.token_ids)
    assert is_same.float().mean() > 0.97  # rounding of float32 sums may move a draw across a token boundary
    errors = rows.logprob_log_LR[1].cpu() - torch.tensor(expected.logprobs)
    assert errors[is_same].abs().max() < 1e-4
    errors = rows.entropy_log_LR[1].cpu() - torch.tensor(expected.entropies)
    assert errors.abs().max() < 1e-3
    assert rows.entropy_log_LR[[0, 2]].isnan().all()


def rotate(heads_NHD, cos_ND, sin_ND):
    first, second = heads_NHD.chunk(2, dim=-1)
    return heads_NHD * cos_ND[:, None] + torch.cat((-second, first), dim=-1) * sin_ND[:, None]


@pytest.mark.parametrize(("window", "softcap", "has_prologue"), [(0, 0.0, False), (0, 0.0, True), (40, 5.0, True)])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (16, 8, 128), (7, 1, 96)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_attention_kernels_equal_a_dense_softmax(
    heads, kv_heads, size, window, softcap, has_prologue, dtype, tolerance
):
    from tunesmith.engine.batch.kv_cache import KVCache, LayerShape
    from tunesmith.engine.core.span import Span
    from tunesmith.engine.cuda.attention_plans import build_prefill_plan
    from tunesmith.engine.cuda.decode_work import DecodeWork, Divider
    from tunesmith.engine.cuda.kernels.paged_decode import list_items, run_paged_decode
    from tunesmith.model.kernels.paged_prefill import run_paged_prefill
    from tunesmith.model.kernels.span_attention import count_tile_rows, get_tile_tokens

    torch.manual_seed(0)
    device = torch.device("cuda")
    shape = [LayerShape(kv_heads, size)]
    cache = KVCache(shape, num_blocks=400, block_size=16, dtype=dtype, device=device)
    blocks = torch.randperm(400).view(4, 100).tolist()
    starts, stops = [0, 160, 33, 700], [150, 161, 290, 720]
    spans, first = [], 0
    for start, stop, mine in zip(starts, stops, blocks, strict=True):
        spans.append(Span(first, start, stop, mine))
        first += stop - start
    for tensor in (cache.keys[0], cache.values[0]):
        tensor.normal_()
    tile_tokens = get_tile_tokens(heads // kv_heads, count_tile_rows(size, dtype))
    plan = build_prefill_plan(cache, spans, tile_tokens=tile_tokens, device=device).layers[0]

    def run(num_tokens, attend):
        query, key, value = (
            torch.randn(num_tokens, n, size, device=device).to(dtype) for n in (heads, kv_heads, kv_heads)
        )
        angles, weights = torch.randn(2, num_tokens, size, device=device).to(dtype), torch.rand(2, size, device=device)
        prologue = None
        if has_prologue:
            prologue = Prologue(
                cos_1TD=angles[:1], sin_1TD=angles[1:], query_norm_D=weights[0].to(dtype),
                key_norm_D=weights[1].to(dtype), epsilon=1e-5,
            )  # fmt: skip
        transposed = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
        output = attend(*transposed, prologue)[0]
        query, key = query.double(), key.double()
        if has_prologue:
            rotated = []
            for heads_NHD, weight_D in ((query, weights[0]), (key, weights[1])):
                normed = heads_NHD * torch.rsqrt(heads_NHD.pow(2).mean(-1, keepdim=True) + 1e-5)
                rotated.append(rotate(normed * weight_D.to(dtype).double(), *angles.double()))
            query, key = rotated
        return output.double(), query, key, value.double()

    def compare(output, query, key, value, spans):
        for span in spans:
            new = slice(span.first, span.first + span.stop - span.start)
            kept = [
                cached[0][span.blocks].transpose(0, 1).reshape(kv_heads, -1, size)[:, : span.stop].double()
                for cached in (cache.keys, cache.values)
            ]
            for tensor, fresh in zip(kept, (key, value), strict=True):
                torch.testing.assert_close(tensor[:, span.start :].transpose(0, 1), fresh[new], atol=5e-2, rtol=2e-2)
            scores = torch.einsum("qkgd,ksd->kgqs", query[new].unflatten(1, (kv_heads, -1)), kept[0]) * 0.1
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            positions = torch.arange(span.start, span.stop, device=device)[:, None]
            distance = positions - torch.arange(span.stop, device=device)
            hidden = (distance < 0) | (distance >= window) if window else distance < 0
            expected = torch.einsum("kgqs,ksd->qkgd", scores.masked_fill(hidden, -math.inf).softmax(-1), kept[1])
            expected = expected.flatten(1, 2)
            assert (output[new] - expected).norm() < tolerance * expected.norm()

    def prefill(query, key, value, prologue):
        return run_paged_prefill(query, key, value, *plan.tensors, 0.1, window, softcap, None, prologue)

    compare(*run(first, prefill), spans)
    table = torch.tensor(blocks, dtype=torch.int32, device=device)
    divider = Divider(block_size=16, num_kv_heads=kv_heads, num_heads=heads, head_size=size, num_sms=132, window=window)
    division = divider.divide(table.cpu().numpy(), np.array(stops), num_steps=1)
    division_7S = np.zeros((7, 4), dtype=np.int32)
    division.fill(division_7S)
    work = DecodeWork.allocate(
        divider, division.kind, torch.tensor(stops, device=device), torch.from_numpy(division_7S).to(device)
    )
    list_items(work)

    def decode(query, key, value, prologue):
        return run_paged_decode(
            query, key, value, cache.keys[0], cache.values[0], table, work.positions_R, work.items_2WF,
            work.parts_2R2, 0.1, window, softcap, None, prologue,
        )  # fmt: skip

    next_spans = [Span(row, stop, stop + 1, mine) for row, (stop, mine) in enumerate(zip(stops, blocks, strict=True))]

    def step(query, key, value, prologue):
        """As exact numerics decode."""
        positions, slots = work.positions_R.expand(3, -1), work.positions_R
        return run_paged_prefill(
            query, key, value, cache.keys[0], cache.values[0], slots, table, positions, table.new_empty((2, 0)), 0.1,
            window, softcap, None, prologue,
        )  # fmt: skip

    for attend in (decode, step):
        compare(*run(4, attend), next_spans)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_rowwise_kernels_equal_their_formulas(dtype, tolerance):
    from tunesmith.model.kernels.layer_ops import rms_norm, silu_and_mul

    torch.manual_seed(0)
    inputs, weight = torch.randn(3, 70, 1536, device="cuda").to(dtype), torch.randn(1536, device="cuda").to(dtype)
    wide = inputs.double()
    for output, expected in (
        (
            rms_norm(inputs, weight, 1e-5),
            wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double(),
        ),
        (silu_and_mul(*inputs.chunk(2, dim=-1)), functional.silu(wide[..., :768]) * wide[..., 768:]),
    ):
        assert (output.double() - expected).norm() < tolerance * expected.norm()


def test_contexts_split_over_programs_give_the_same_tokens():
    prompts = [[5, 6, 7] * 170, [8]]
    samplings = [Sampling(max_tokens=40, distribution=GREEDY), Sampling(max_tokens=70, distribution=GREEDY)]
    model = build_model()
    for prompt, completion in zip(prompts, generate(build_engine(model), prompts, samplings), strict=True):
        ids = torch.tensor([[*prompt, *completion.sampled_ids]], device="cuda")
        with torch.no_grad():
            expected = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1).max(-1)
        assert list(completion.sampled_ids) == expected.indices.tolist()
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected.values.cpu(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("mode", ["graphs", "compiled"])
def test_shared_prompts_that_are_read_once_give_the_same_tokens_and_logprobs(mode):
    """A system prompt of all, longer prompts of two groups, and replies that end at different times."""
    model = build_model("qwen3")
    system, groups = [7 * n % 90 + 1 for n in range(530)], [[5 * n % 80 + g for n in range(550)] for g in (2, 9)]
    prompts = [[*system, *groups[n % 2], n + 1] for n in range(10)] + [[*system, 3], [4, 5]]
    samplings = [Sampling(max_tokens=20 + 9 * n, seed=n) for n in range(len(prompts))]

    def run(cuda_decode):
        section = EngineSection(kv_cache_tokens=16384, cuda_decode=cuda_decode)
        return generate(LocalEngine(model, None, section, max_model_len=1300), prompts, samplings)

    shared, repeated, alone = run(mode), run(mode), run("eager")
    assert [c.sampled_ids for c in shared] == [c.sampled_ids for c in repeated] == [c.sampled_ids for c in alone]
    assert [c.logprobs for c in shared] == [c.logprobs for c in repeated]
    for ours, theirs in zip(shared, alone, strict=True):
        torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [{"decode_block": 1}, {"decode_block": 7}, {"cuda_decode": "eager"}, {"cuda_decode": "compiled"}],
)
def test_tokens_do_not_depend_on_burst_length_or_graphs(settings):
    model = build_model("qwen3")
    prompts = [[n, n + 1] for n in range(1, 20)]
    distributions = [TRUNCATED[n % len(TRUNCATED)] for n in range(20)]
    samplings = [Sampling(max_tokens=3 + 2 * n, seed=n, distribution=distributions[n]) for n in range(1, 20)]
    plain = generate(build_engine(model), prompts, samplings)
    other = generate(build_engine(model, **settings), prompts, samplings)
    assert [c.sampled_ids for c in plain] == [c.sampled_ids for c in other]
    assert [len(c.sampled_ids) for c in plain] == [s.max_tokens for s in samplings]


@pytest.mark.parametrize("mode", ["graphs", "compiled"])
def test_graphs_follow_weights_updated_in_place_or_moved(mode):
    model = build_model()
    engine = build_engine(model, cuda_decode=mode)
    prompts, samplings = [[3, 4, 5]], [Sampling(max_tokens=24, distribution=GREEDY)]
    seen = {generate(engine, prompts, samplings)[0].sampled_ids}
    for version in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn_like(parameter) * 0.1
                if version == 1:
                    parameter.add_(noise)
                else:
                    parameter.data = parameter.data + noise
        engine.pause()
        engine.resume(version)
        after = generate(engine, prompts, samplings)[0]
        ids = torch.tensor([[*prompts[0], *after.sampled_ids]], device="cuda")
        with torch.no_grad():
            expected = model(input_ids=ids).logits[0, len(prompts[0]) - 1 : -1].argmax(-1)
        assert list(after.sampled_ids) == expected.tolist()
        assert after.sampled_ids not in seen
        assert set(after.policy_versions) == {version}
        seen.add(after.sampled_ids)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gemma2"])
def test_fused_layers_decode_the_same_tokens(name):
    model = build_model(name)
    prompts = [[n, n + 1, n + 2] for n in range(1, 12)]
    samplings = [Sampling(max_tokens=20, distribution=GREEDY)] * len(prompts)
    plain = generate(build_engine(model, cuda_decode="eager"), prompts, samplings)
    fused = generate(build_engine(model, cuda_decode="compiled"), prompts, samplings)
    assert [c.sampled_ids for c in plain] == [c.sampled_ids for c in fused]


@pytest.mark.parametrize("mode", ["graphs", "compiled"])
def test_a_request_whose_logits_are_not_finite_fails_alone(mode):
    model = build_model()
    engine = build_engine(model, cuda_decode=mode)
    with torch.no_grad():
        model.get_input_embeddings().weight[42] = float("nan")

    async def run():
        calls = [engine.generate([42, 1], Sampling(max_tokens=4)), engine.generate([1, 2], Sampling(max_tokens=4))]
        return await asyncio.gather(*calls, return_exceptions=True)

    broken, _ = asyncio.run(run())
    assert isinstance(broken, EngineError)
    assert "not finite" in str(broken)


def test_out_of_memory_is_an_error_that_names_the_knobs_and_the_engine_recovers():
    model = build_model()
    engine = build_engine(model)
    head = model.get_output_embeddings()

    def exhaust(*_):
        torch.empty(2**50, dtype=torch.uint8, device="cuda")

    hook = head.register_forward_hook(exhaust)

    async def run():
        return await asyncio.gather(engine.generate([1, 2], Sampling(max_tokens=4)), return_exceptions=True)

    (failed,) = asyncio.run(run())
    assert isinstance(failed, EngineError)
    assert "OutOfMemoryError" in str(failed)
    assert "engine.kv_cache_gib" in str(failed)
    hook.remove()
    (completed,) = asyncio.run(run())
    assert len(completed.sampled_ids) == 4
