"""Recurrent states in the engine: forks of prompts, snapshots of prefixes, slots that are used again."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from engines import GREEDY, build_engine, build_prompts, compute_reference_logits, generate_all
from host_bursts import build_burst_engine
from tiny_models import build_tiny
from trainable_models import build_trainable
from tunesmith.engine.core.block_manager import SnapshotPool
from tunesmith.errors import EngineError
from tunesmith.experience.samples import build_trie
from tunesmith.model.forward.attention import run_body
from tunesmith.model.forward.logits import compute_logits
from tunesmith.trainer.tree_attention.plan import TreePlan
from tunesmith.types import Completion, Sample, Sampling

NAMES = ["lfm2", "qwen3_5", "nemotron_h"]
SAMPLING = Sampling(max_tokens=6, distribution=GREEDY)


def check(name: str, prompts: list[list[int]], completions: list[Completion]) -> None:
    """Tokens and logprobs are those of one plain forward of each sequence."""
    for prompt, completion in zip(prompts, completions, strict=True):
        logits = compute_reference_logits(build_tiny(name), prompt, completion.sampled_ids)
        assert list(completion.sampled_ids) == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).amax(-1)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("build", [build_engine, build_burst_engine])
@pytest.mark.parametrize("name", NAMES)
def test_prompts_that_fork_at_any_token_start_from_a_snapshot(build, name):
    engine, sampling = build(name, max_batched_tokens=64), replace(SAMPLING, max_tokens=3)
    whole = build_prompts(21)[0]
    for fork in range(1, 21):
        prompts = [whole, [*whole[:fork], 96 - fork, 5], [*whole[:fork], 3]]
        check(name, prompts, generate_all(engine, prompts, sampling))
    assert engine.compute_stats()["engine/num_cached_tokens"] > 20 * 20  # of the whole prompt alone


@pytest.mark.parametrize("name", NAMES)
def test_a_prefix_is_reused_up_to_its_last_snapshot(name):
    """Blocks have 4 tokens. The first prompt leaves a snapshot after 20 of its 22 tokens, so a prompt that shares 13
    starts anew, and leaves one after the 12 shared tokens of whole blocks; the third starts from that."""
    engine, whole = build_engine(name), build_prompts(22)[0]
    others = [[*whole[:13], token, 7, 8] for token in (1, 2)]
    found = [generate_all(engine, [prompt], SAMPLING)[0] for prompt in (whole, *others, whole)]
    check(name, [whole, *others, whole], found)
    assert [each.num_cached_tokens for each in found] == [0, 0, 12, 20]


@pytest.mark.parametrize("name", NAMES)
def test_a_group_computes_its_prompt_once(name):
    engine, prompts = build_engine(name), build_prompts(22) * 8
    check(name, prompts, generate_all(engine, prompts, SAMPLING))
    assert engine.compute_stats()["engine/num_prefill_tokens"] == 22 + 7 * 2


@pytest.mark.parametrize("name", NAMES)
def test_new_weights_forget_snapshots(name):
    engine, prompts = build_engine(name), build_prompts(22)
    generate_all(engine, prompts, SAMPLING)
    engine.pause()
    engine.resume(1)
    assert generate_all(engine, prompts, SAMPLING)[0].num_cached_tokens == 0


def test_a_step_that_failed_leaves_no_snapshot(monkeypatch):
    """Its states may not have been written."""
    engine, prompts = build_engine("lfm2"), build_prompts(22)
    with monkeypatch.context() as patch, pytest.raises(EngineError):
        patch.setattr(engine._runner, "run", lambda chunks: 1 / 0)
        generate_all(engine, prompts, SAMPLING)
    for _ in range(2):
        check("lfm2", prompts, generate_all(engine, prompts, SAMPLING))


@pytest.mark.parametrize("name", NAMES)
def test_a_slot_that_is_not_reset_is_found(name):
    """A fault planted for the comparisons above: requests start from what others have left."""
    engine, prompts = build_engine(name, max_num_seqs=1), build_prompts(9, 14)
    generate_all(engine, prompts, SAMPLING)
    for states in engine._runner.cache.states.values():
        for each in states.values():
            each[engine._runner.slots["empty_slot"]] = each[0]
    with pytest.raises(AssertionError):
        check(name, prompts, generate_all(engine, prompts, SAMPLING))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "qwen3_next", "granitemoehybrid", "falcon_h1"])
def test_the_trainer_computes_the_logprobs_of_the_engine_on_a_trie(name, dtype):
    model = build_trainable(name, dtype=dtype)
    engine, prompts = build_engine(copy.deepcopy(model), has_packed_weights=False), build_prompts(7) * 3
    answers = generate_all(engine, prompts, Sampling(max_tokens=70))
    samples = [
        Sample(
            token_ids=(*prompt, *answer.sampled_ids), is_sampled=(False,) * 7 + (True,) * 70,
            logprobs=(0.0,) * 77, advantages=(0.0,) * 77, policy_versions=(None,) * 77, distribution_spans=(),
            group_index=0, trajectory_index=0,
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]  # fmt: skip
    trie = build_trie(samples, range(3))
    ids, depth = torch.as_tensor(trie.token_ids_T)[None], torch.as_tensor(trie.depth_T)[None]
    with torch.no_grad():
        logits = compute_logits(model, run_body(model, ids, depth, TreePlan(trie, torch.device("cpu")))[0])
    found = logits.log_softmax(-1)[trie.parent_E, trie.target_E]
    expected = torch.tensor([value for answer in answers for value in answer.logprobs], dtype=dtype)
    # the sampler returns float32
    torch.testing.assert_close(found, expected, atol=2e-5 if dtype == torch.float32 else 1e-6, rtol=0)


def test_the_least_recently_used_snapshot_gives_way_unless_it_is_kept():
    pool = SnapshotPool(range(10, 12))
    for name in (b"a", b"b"):
        pool.publish(name, pool.take(name, ()))
    assert pool.find([b"a", b"x"], {}) == (1, 10)  # found in the first of two blocks, and used last
    assert pool.take(b"a", ()) is None
    slot = pool.take(b"c", {10})
    assert slot == 11 and pool.find([b"b"], {}) == (0, None)
    pool.publish(b"c", slot)
    assert pool.take(b"d", {10, 11}) is None
    assert pool.find([b"a", b"e"], {b"e": 12}) == (2, 12)  # one that is published later
    pool.reset()
    assert pool.find([b"a", b"c"], {}) == (0, None) and [pool.take(b"f", ()) for _ in range(2)] == [10, 11]
    for slot in (10, 11):
        pool.publish(b"f", slot)  # two forwards of a step leave it
    assert pool.find([b"f"], {}) == (1, 10) and pool.take(b"g", {10}) == 11
