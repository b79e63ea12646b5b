"""Attention over runs of blocks equals attention over the whole context, and shared blocks are read once."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines import GREEDY, build_engine, build_prompts, compute_reference_logits, generate_all
from tiny_models import CONFIGS, build_tiny
from tunesmith.engine.batch import kv_cache as attention
from tunesmith.engine.batch.contiguous_attention import ContiguousBatch, KeyRun, find_groups
from tunesmith.engine.core.span import BlockRun, Span, extend_runs
from tunesmith.model.forward.attention import AttentionOptions
from tunesmith.types import Sampling

BLOCK_SIZE, NUM_BLOCKS, NUM_KV_HEADS, NUM_HEADS, HEAD_SIZE = 4, 64, 2, 6, 8


def build_span(index: int, blocks: list[int], length: int) -> Span:
    runs: list[BlockRun] = []
    extend_runs(runs, blocks)
    return Span(index, length - 1, length, blocks, runs)


def test_adjacent_blocks_form_one_run_even_if_added_later() -> None:
    runs: list[BlockRun] = []
    extend_runs(runs, [7, 8, 3])
    extend_runs(runs, [4, 9])
    assert runs == [BlockRun(7, 2), BlockRun(3, 2), BlockRun(9, 1)]


def test_requests_with_a_shared_prefix_form_one_group_that_reads_it_once() -> None:
    tables = [[0, 1, 2, 3], [9], [0, 1, 2, 5], [0, 1, 7]]
    spans = [build_span(index, blocks, 4 * len(blocks) - 1) for index, blocks in enumerate(tables)]
    group, alone = find_groups(spans, block_size=4, sliding_window=None)
    assert (group.members, group.lengths) == ((0, 2, 3), (15, 15, 11))
    assert group.key_runs == (
        KeyRun(rows=(0, 3), columns=(0, 8), slot=0),
        KeyRun(rows=(0, 2), columns=(8, 12), slot=8),
        KeyRun(rows=(0, 1), columns=(12, 15), slot=12),
        KeyRun(rows=(1, 2), columns=(12, 15), slot=20),
        KeyRun(rows=(2, 3), columns=(8, 11), slot=28),
    )
    assert alone.key_runs == (KeyRun(rows=(0, 1), columns=(0, 3), slot=36),)


def test_a_sliding_window_excludes_the_tokens_before_it() -> None:
    spans = [build_span(0, [0, 1, 2, 5], 15), build_span(1, [0, 1, 6], 10)]
    first, second = find_groups(spans, block_size=4, sliding_window=6)
    assert first.key_runs == (KeyRun((0, 1), (0, 3), 9), KeyRun((0, 1), (3, 6), 20))
    assert second.key_runs == (KeyRun((0, 1), (0, 4), 4), KeyRun((0, 1), (4, 6), 24))


@st.composite
def tables(draw: st.DrawFn) -> list[tuple[list[int], int]]:
    """Block tables that share prefixes of one another, each with its number of tokens."""
    free = draw(st.permutations(range(NUM_BLOCKS))) if draw(st.booleans()) else list(range(NUM_BLOCKS))
    known: list[tuple[list[int], int]] = []
    for _ in range(draw(st.integers(1, 6))):
        parent, length = draw(st.sampled_from(known)) if known else ([], 0)
        num_shared = draw(st.integers(0, length // BLOCK_SIZE))
        num_own = draw(st.integers(1, 5))
        blocks = parent[:num_shared] + [free.pop() for _ in range(num_own)]
        known.append((blocks, len(blocks) * BLOCK_SIZE - draw(st.integers(0, BLOCK_SIZE - 1))))
    return known


@given(tables(), st.sampled_from([None, 3, 9, 100]), st.sampled_from([None, 1.5]))
def test_any_block_table_gives_the_attention_of_the_whole_context(
    known: list[tuple[list[int], int]], window: int | None, softcap: float | None
) -> None:
    generator = torch.Generator().manual_seed(len(known))
    size = (NUM_KV_HEADS, NUM_BLOCKS, BLOCK_SIZE, HEAD_SIZE)
    keys, values = (torch.randn(size, generator=generator) for _ in range(2))
    query = torch.randn((len(known), NUM_HEADS, HEAD_SIZE), generator=generator)
    spans = [build_span(index, blocks, length) for index, (blocks, length) in enumerate(known)]
    batch = ContiguousBatch(spans, block_size=BLOCK_SIZE, device=torch.device("cpu"))
    output = batch.attend(query, keys, values, AttentionOptions(scaling=0.7, sliding_window=window, softcap=softcap))
    for row, (blocks, length) in enumerate(known):
        first = 0 if window is None else max(0, length - window)
        context = [tensor[:, blocks].flatten(1, 2)[:, first:length] for tensor in (keys, values)]
        key, value = (tensor.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=0) for tensor in context)
        scores = torch.einsum("hd,hsd->hs", query[row], key) * 0.7
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        expected = torch.einsum("hs,hsd->hd", scores.softmax(-1), value)
        torch.testing.assert_close(output[row], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("run_bytes", [0, math.inf])
def test_views_and_gathered_blocks_both_give_the_tokens_of_a_plain_forward(
    name: str, run_bytes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "RUN_BYTES", run_bytes)
    (shared,) = build_prompts(21)
    prompts = [*build_prompts(30, 5), *([*shared, *tail] for tail in build_prompts(2, 7, 7))]
    completions = generate_all(build_engine(name), prompts, Sampling(max_tokens=12, distribution=GREEDY))
    for prompt, completion in zip(prompts, completions, strict=True):
        logits = compute_reference_logits(build_tiny(name), prompt, completion.sampled_ids)
        assert list(completion.sampled_ids) == logits.argmax(-1).tolist()
