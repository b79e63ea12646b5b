"""Attention plans for CUDA devices: paged decode and paged prefill, one plan object per layer.

A layer's plan holds the layer's KV-cache blocks and the index tensors that all layers share. A traced layer therefore
reads only tensors, and all layers share one trace.

Axes: T tokens, R requests, I tiles, B KV-cache blocks, K key-value heads, Z block size, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tunesmith.engine.batch.arrays import join_ranges, send
from tunesmith.engine.batch.kv_cache import KVCache
from tunesmith.engine.core.span import Span
from tunesmith.engine.cuda import custom_ops as ops
from tunesmith.model.forward.attention import get_layer_index


class _LayerPlan:
    """One layer's KV-cache blocks."""

    def __init__(self, keys_BKZD: Tensor, values_BKZD: Tensor) -> None:
        self.keys = keys_BKZD
        self.values = values_BKZD


class DecodeLayerPlan(_LayerPlan):
    """One layer's attention with one new token per request."""

    def __init__(self, keys_BKZD: Tensor, values_BKZD: Tensor, block_table_RB: Tensor, positions_R: Tensor) -> None:
        super().__init__(keys_BKZD, values_BKZD)
        self.block_table = block_table_RB
        self.positions = positions_R

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return ops.paged_decode(
            query, key, value, self.keys, self.values, self.block_table, self.positions,
            scaling, sliding_window or 0, softcap or 0.0,
        )  # fmt: skip


class PrefillLayerPlan(_LayerPlan):
    """One layer's attention with any number of new tokens per request."""

    def __init__(
        self,
        keys_BKZD: Tensor,
        values_BKZD: Tensor,
        slot_mapping_T: Tensor,
        block_table_RB: Tensor,
        spans_3R: Tensor,
        tiles_2I: Tensor,
    ) -> None:
        super().__init__(keys_BKZD, values_BKZD)
        self.slot_mapping = slot_mapping_T
        self.block_table = block_table_RB
        self.spans = spans_3R
        self.tiles = tiles_2I

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return ops.paged_prefill(
            query, key, value, self.keys, self.values, self.slot_mapping, self.block_table, self.spans, self.tiles,
            scaling, sliding_window or 0, softcap or 0.0,
        )  # fmt: skip


class LayeredPlan:
    """The plans of all layers as one `AttentionPlan` for `run_body`."""

    def __init__(self, layers: Sequence[DecodeLayerPlan | PrefillLayerPlan]) -> None:
        self.layers = layers

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return self.layers[get_layer_index(module)].attend(module, query, key, value, **options)


def build_decode_plan(cache: KVCache, block_table_RB: Tensor, positions_R: Tensor) -> LayeredPlan:
    """Decode attention of requests whose last known token is at `positions_R`."""
    pages = zip(cache.keys, cache.values, strict=True)
    return LayeredPlan([DecodeLayerPlan(keys, values, block_table_RB, positions_R) for keys, values in pages])


def build_prefill_plan(cache: KVCache, spans: Sequence[Span], *, tile_tokens: int, device: torch.device) -> LayeredPlan:
    """Prefill attention of spans concatenated in one row; a tile holds at most `tile_tokens` tokens of one span."""
    size = cache.page_size
    firsts_R, starts_R, stops_R = np.array([(span.first, span.start, span.stop) for span in spans], dtype=np.int64).T
    lengths_R, num_pages_R = stops_R - starts_R, -(-stops_R // size)
    requests_R = np.arange(len(spans))
    block_table_RB = np.zeros((len(spans), num_pages_R.max()), dtype=np.int32)
    used = zip(spans, num_pages_R.tolist(), strict=True)
    block_table_RB[np.arange(block_table_RB.shape[1]) < num_pages_R[:, None]] = [
        page for span, num_pages in used for page in span.pages[:num_pages]
    ]
    positions_T = join_ranges(starts_R, lengths_R)
    pages_T = block_table_RB[np.repeat(requests_R, lengths_R), positions_T // size].astype(np.int64)
    num_tiles_R = -(-lengths_R // tile_tokens)
    tiles_2I = [np.repeat(requests_R, num_tiles_R), join_ranges(np.zeros_like(starts_R), num_tiles_R) * tile_tokens]
    tensors = [
        send(array, device)
        for array in (
            pages_T * size + positions_T % size,
            block_table_RB,
            np.array([firsts_R, starts_R, stops_R], dtype=np.int32),
            np.array(tiles_2I, dtype=np.int32),
        )
    ]
    pages_of_layers = zip(cache.keys, cache.values, strict=True)
    return LayeredPlan([PrefillLayerPlan(keys, values, *tensors) for keys, values in pages_of_layers])
