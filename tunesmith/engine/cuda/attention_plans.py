"""Attention plans for CUDA devices: paged decode and paged prefill, one plan object per layer.

A layer's plan holds the layer's KV-cache blocks and the index tensors that all layers share. A traced layer therefore
reads only tensors, and all layers share one trace.

Axes: T tokens, R requests, I tiles, P KV-cache blocks, K key-value heads, Z block size, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from tunesmith.engine.batch.arrays import concatenate_ranges, copy_to_device
from tunesmith.engine.batch.kv_cache import KVCache
from tunesmith.engine.core.span import Span
from tunesmith.engine.cuda import custom_ops as ops
from tunesmith.model.forward.attention import AttentionOptions, get_layer_index


class _LayerPlan:
    """One layer's KV-cache blocks."""

    def __init__(self, keys_PKZD: Tensor, values_PKZD: Tensor) -> None:
        self.keys = keys_PKZD
        self.values = values_PKZD


class DecodeLayerPlan(_LayerPlan):
    """One layer's attention with one new token per request."""

    def __init__(self, keys_PKZD: Tensor, values_PKZD: Tensor, block_table_RP: Tensor, positions_R: Tensor) -> None:
        super().__init__(keys_PKZD, values_PKZD)
        self.block_table = block_table_RP
        self.positions = positions_R

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        return ops.paged_decode(
            query, key, value, self.keys, self.values, self.block_table, self.positions,
            options.get_scaling(query.shape[-1]), options.sliding_window or 0, options.softcap or 0.0,
        )  # fmt: skip


class PrefillLayerPlan(_LayerPlan):
    """One layer's attention with any number of new tokens per request."""

    def __init__(
        self,
        keys_PKZD: Tensor,
        values_PKZD: Tensor,
        slot_mapping_T: Tensor,
        block_table_RP: Tensor,
        spans_3R: Tensor,
        tiles_2I: Tensor,
    ) -> None:
        super().__init__(keys_PKZD, values_PKZD)
        self.slot_mapping = slot_mapping_T
        self.block_table = block_table_RP
        self.spans = spans_3R
        self.tiles = tiles_2I

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        return ops.paged_prefill(
            query, key, value, self.keys, self.values, self.slot_mapping, self.block_table, self.spans, self.tiles,
            options.get_scaling(query.shape[-1]), options.sliding_window or 0, options.softcap or 0.0,
        )  # fmt: skip


class LayeredPlan:
    """The plans of all layers as one `AttentionPlan` for `run_body`."""

    def __init__(self, layers: Sequence[DecodeLayerPlan | PrefillLayerPlan]) -> None:
        self.layers = layers

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        return self.layers[get_layer_index(module)].attend(module, query, key, value, options)


def build_decode_plan(cache: KVCache, block_table_RP: Tensor, positions_R: Tensor) -> LayeredPlan:
    """Decode attention of requests whose last known token is at `positions_R`."""
    blocks = zip(cache.keys, cache.values, strict=True)
    return LayeredPlan([DecodeLayerPlan(keys, values, block_table_RP, positions_R) for keys, values in blocks])


def build_prefill_plan(cache: KVCache, spans: Sequence[Span], *, tile_tokens: int, device: torch.device) -> LayeredPlan:
    """Prefill attention of spans concatenated in one row; a tile holds at most `tile_tokens` tokens of one span."""
    size = cache.block_size
    firsts_R, starts_R, stops_R = np.array([(span.first, span.start, span.stop) for span in spans], dtype=np.int64).T
    lengths_R, num_blocks_R = stops_R - starts_R, -(-stops_R // size)
    requests_R = np.arange(len(spans))
    block_table_RP = np.zeros((len(spans), num_blocks_R.max()), dtype=np.int32)
    used = zip(spans, num_blocks_R.tolist(), strict=True)
    block_table_RP[np.arange(block_table_RP.shape[1]) < num_blocks_R[:, None]] = [
        block for span, num_blocks in used for block in span.blocks[:num_blocks]
    ]
    positions_T = concatenate_ranges(starts_R, lengths_R)
    blocks_T = block_table_RP[np.repeat(requests_R, lengths_R), positions_T // size].astype(np.int64)
    num_tiles_R = -(-lengths_R // tile_tokens)
    tile_offsets_I = concatenate_ranges(np.zeros_like(starts_R), num_tiles_R) * tile_tokens
    tiles_2I = [np.repeat(requests_R, num_tiles_R), tile_offsets_I]
    tensors = [
        copy_to_device(array, device)
        for array in (
            blocks_T * size + positions_T % size,
            block_table_RP,
            np.array([firsts_R, starts_R, stops_R], dtype=np.int32),
            np.array(tiles_2I, dtype=np.int32),
        )
    ]
    blocks_of_layers = zip(cache.keys, cache.values, strict=True)
    return LayeredPlan([PrefillLayerPlan(keys, values, *tensors) for keys, values in blocks_of_layers])
