"""Concatenated ranges, copies to a device, and the arrays of a prefill plan."""

from __future__ import annotations

import numpy as np
import torch

from tunesmith.engine.batch.kv_cache import KVCache, LayerShape
from tunesmith.engine.core.span import Span
from tunesmith.engine.cuda.attention_plans import build_prefill_arrays, build_prefill_plan
from tunesmith.engine.cuda.custom_ops import paged_prefill
from tunesmith.model.arrays import concatenate_ranges, copy_to_device, pad_tiles


def test_ranges_are_concatenated() -> None:
    assert concatenate_ranges(np.array([5, 9, 0]), np.array([2, 0, 3])).tolist() == [5, 6, 0, 1, 2]
    assert concatenate_ranges(np.array([], dtype=np.int64), np.array([], dtype=np.int64)).tolist() == []


def test_a_copied_array_keeps_dtype_and_order() -> None:
    sent = copy_to_device(np.arange(6, dtype=np.int32).reshape(2, 3).T, torch.device("cpu"))
    assert sent.dtype == torch.int32
    assert sent.is_contiguous()
    assert sent.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_prefill_plan_has_slots_block_table_spans_and_tiles_and_a_request_without_tokens() -> None:
    device = torch.device("cpu")
    cache = KVCache([LayerShape(1, 2)], num_blocks=40, block_size=4, dtype=torch.float32, device=device)
    spans = [Span(0, 0, 5, [30, 31, 32]), Span(5, 6, 9, [7, 8, 9])]
    (layer,) = build_prefill_plan(cache, spans, tile_tokens=2, device=device).layers
    assert layer.operation is paged_prefill
    keys, values, slot_mapping, block_table, spans_3R, tiles = layer.tensors
    assert keys is cache.keys[0] and values is cache.values[0]
    assert slot_mapping.tolist() == [120, 121, 122, 123, 124, 34, 35, 36]
    assert block_table.tolist() == [[30, 31, 0], [7, 8, 9], [0, 0, 0]]
    assert spans_3R.tolist() == [[0, 5, 0], [0, 6, 0], [5, 9, 0]]
    assert tiles.tolist() == [[1, 1, 0, 0, 0, 2], [2, 0, 4, 2, 0, 0]]  # the most context first, then padding


def test_tiles_of_padding_are_at_the_start_of_the_request_without_tokens() -> None:
    """A tile attends to all tokens before its first one, so another offset costs time, or leaves the block table."""
    tiles = np.array([[0, 0, 1], [0, 2, 0]], dtype=np.int32)
    padded = pad_tiles(tiles, 5, empty=512)
    assert padded.tolist() == [[0, 0, 1, 512, 512], [0, 2, 0, 0, 0]] and padded.dtype == np.int32


def test_the_prefill_arrays_of_no_spans_are_empty() -> None:
    arrays = build_prefill_arrays(4, [], tile_tokens=2)
    assert arrays.block_table_RP.shape == (0, 0)
    assert arrays.spans_3R.shape == (3, 0)
    assert arrays.tiles_2I.shape == (2, 0)
    assert len(arrays.slot_mapping_T) == len(arrays.positions_T) == 0
