"""One or two requests, each one run of blocks, attend to the tokens of their own context."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tunesmith.engine.batch.kv_cache import (
    MAX_REQUESTS,
    KVCache,
    LayerShape,
    PagedAttentionPlan,
    SingleRunPlan,
    has_single_runs,
)
from tunesmith.engine.core.span import BlockRun, Span
from tunesmith.model.forward.attention import AttentionOptions

CPU = torch.device("cpu")


def build_span(first: int, length: int, *, block: int, num_blocks: int) -> Span:
    blocks = list(range(block, block + num_blocks))
    return Span(first, length - 1, length, blocks, (BlockRun(block, num_blocks),))


def build_cache() -> KVCache:
    shapes = [LayerShape(num_kv_heads=2, head_size=8)]
    cache = KVCache(shapes, num_blocks=12, block_size=4, dtype=torch.float32, device=CPU, is_head_major=True)
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    return cache


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(),
        AttentionOptions(scaling=0.3),
        AttentionOptions(sliding_window=5),
        AttentionOptions(softcap=2.0, scaling=0.5),
    ],
)
@pytest.mark.parametrize("num_requests", [1, 2, 3])
def test_output_and_cache_equal_those_of_the_paged_plan(options: AttentionOptions, num_requests: int) -> None:
    places = [(9, 5, 3), (13, 8, 4), (17, 0, 5)][:num_requests]
    spans = [
        build_span(row, length, block=block, num_blocks=num_blocks)
        for row, (length, block, num_blocks) in enumerate(places)
    ]
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(1, 6, num_requests, 8, generator=generator)
    key, value = torch.randn(2, 1, 2, num_requests, 8, generator=generator).unbind(0)
    layer = SimpleNamespace(layer_idx=0)
    caches = build_cache(), build_cache()
    expected = PagedAttentionPlan(caches[0], spans, CPU).attend(layer, query, key, value, options)
    output = SingleRunPlan(caches[1], spans).attend(layer, query, key, value, options)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(caches[0].keys[0], caches[1].keys[0])
    assert torch.equal(caches[0].values[0], caches[1].values[0])


def test_only_single_new_tokens_on_single_runs_qualify() -> None:
    span = build_span(0, 9, block=5, num_blocks=3)
    assert has_single_runs([span, span])
    assert not has_single_runs([span] * (MAX_REQUESTS + 1))
    assert not has_single_runs([Span(0, 7, 9, span.blocks, span.runs)])
    assert not has_single_runs([Span(0, 8, 9, span.blocks, (BlockRun(5, 1), BlockRun(6, 2)))])
