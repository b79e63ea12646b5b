"""The experts that the engine records are those of a plain forward of the same tokens, however they were computed."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engines import build_prompts, generate_all
from tiny_models import build_tiny
from tunesmith.config import EngineSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.model.experts import find_routers
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.types import Sampling


def build(name: str, **settings) -> LocalEngine:
    section = EngineSection(**{"page_size": 4, "kv_cache_tokens": 2000, "max_num_seqs": 16} | settings)
    engine = LocalEngine(prepare(name), None, section, max_model_len=256)
    engine.record_routes()
    return engine


def prepare(name: str) -> PreTrainedModel:
    model = copy.deepcopy(build_tiny(name))
    use_plan_attention(model)
    return model


def compute_routes(name: str, token_ids: list[int]) -> np.ndarray:
    chosen: list[torch.Tensor] = []
    routers = find_routers(build_tiny(name))
    handles = [router.register_forward_hook(lambda _m, _i, output: chosen.append(output[2])) for router in routers]
    with torch.no_grad():
        build_tiny(name)(input_ids=torch.tensor([token_ids]))
    for handle in handles:
        handle.remove()
    return torch.stack(chosen, dim=1).numpy()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3_moe", {"kv_cache_tokens": 160, "max_batched_tokens": 11}),
        ("glm4_moe", {"kv_cache_tokens": 160, "max_batched_tokens": 11}),
        ("gemma4", {}),
        ("qwen3_moe", {"max_speculating_seqs": 4}),
    ],
)
def test_routes_survive_chunks_preemption_shared_prefixes_and_drafts(name, settings):
    prompts = [[*build_prompts(20)[0], *tail] for tail in build_prompts(1, 9, 30, 5, 2)] * 2
    engine = build(name, **settings)
    completions = generate_all(engine, prompts, Sampling(max_tokens=20))
    stats = engine.compute_stats()
    assert stats["engine/num_cached_tokens"] > 0
    assert (stats["engine/num_preemptions"] > 0) == ("max_batched_tokens" in settings)
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = compute_routes(name, [*prompt, *completion.sampled_ids[:-1]])
        assert completion.routes.dtype == np.int8
        # the order of experts with equal scores, and of routers that do not sort, is not defined
        assert np.array_equal(np.sort(completion.routes), np.sort(expected))


def test_the_next_turn_has_the_routes_of_the_first_and_a_new_version_its_own():
    engine = build("qwen3_moe")
    (prompt,) = build_prompts(13)
    (first,) = generate_all(engine, [prompt], Sampling(max_tokens=9))
    turn = [*prompt, *first.sampled_ids, 5, 6, 7]
    (second,) = generate_all(engine, [turn], Sampling(max_tokens=4))
    assert second.num_cached_tokens >= 20
    assert np.array_equal(second.routes[: len(first.routes)], first.routes)
    assert np.array_equal(
        np.sort(second.routes), np.sort(compute_routes("qwen3_moe", [*turn, *second.sampled_ids[:-1]]))
    )


def test_a_request_that_fills_the_whole_cache_has_its_routes():
    engine = build("qwen3_moe", kv_cache_tokens=32)
    (prompt,) = build_prompts(12)
    (completion,) = generate_all(engine, [prompt], Sampling(max_tokens=60, ignore_eos=True))
    assert completion.stop_reason == "context" and len(completion.sampled_ids) > 10
    expected = compute_routes("qwen3_moe", [*prompt, *completion.sampled_ids[:-1]])
    assert np.array_equal(np.sort(completion.routes), np.sort(expected))
    with pytest.raises(ValueError, match="a prompt of 47 tokens fills the context of 33"):
        generate_all(engine, [[*range(3, 50)], prompt], Sampling(max_tokens=2))


def test_an_engine_that_was_not_asked_returns_none():
    plain = LocalEngine(prepare("qwen3_moe"), None, EngineSection(kv_cache_tokens=500), max_model_len=64)
    assert generate_all(plain, [[1, 2, 3]], Sampling(max_tokens=3))[0].routes is None
