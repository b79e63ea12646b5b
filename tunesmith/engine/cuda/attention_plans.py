"""How the tokens of one forward on a CUDA device attend, layer by layer.

Each layer gets an object of its own, which holds its pages and the tensors that all layers share: a traced layer then
reads tensors only, and all layers share one trace.

Axes: T tokens, R requests, I tiles, P pages, K key-value heads, Z page size, D head size.
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
    """Attention of one layer."""

    def __init__(self, keys_PKZD: Tensor, values_PKZD: Tensor) -> None:
        self.keys = keys_PKZD
        self.values = values_PKZD


class DecodeLayerPlan(_LayerPlan):
    """One new token a request."""

    def __init__(self, keys_PKZD: Tensor, values_PKZD: Tensor, table_RP: Tensor, positions_R: Tensor) -> None:
        super().__init__(keys_PKZD, values_PKZD)
        self.table = table_RP
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
            query, key, value, self.keys, self.values, self.table, self.positions,
            options.get_scaling(query.shape[-1]), options.sliding_window or 0, options.softcap or 0.0,
        )  # fmt: skip


class PrefillLayerPlan(_LayerPlan):
    """Any number of new tokens a request."""

    def __init__(
        self,
        keys_PKZD: Tensor,
        values_PKZD: Tensor,
        slots_T: Tensor,
        table_RP: Tensor,
        spans_3R: Tensor,
        tiles_2I: Tensor,
    ) -> None:
        super().__init__(keys_PKZD, values_PKZD)
        self.slots = slots_T
        self.table = table_RP
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
            query, key, value, self.keys, self.values, self.slots, self.table, self.spans, self.tiles,
            options.get_scaling(query.shape[-1]), options.sliding_window or 0, options.softcap or 0.0,
        )  # fmt: skip


class LayeredPlan:
    """The plan of all layers, for `run_body`."""

    def __init__(self, layers: Sequence[DecodeLayerPlan | PrefillLayerPlan]) -> None:
        self.layers = layers

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        return self.layers[get_layer_index(module)].attend(module, query, key, value, options)


def build_decode_plan(cache: KVCache, table_RP: Tensor, positions_R: Tensor) -> LayeredPlan:
    """Attention of requests whose last known token stands at `positions_R`."""
    pages = zip(cache.keys, cache.values, strict=True)
    return LayeredPlan([DecodeLayerPlan(keys, values, table_RP, positions_R) for keys, values in pages])


def build_prefill_plan(cache: KVCache, spans: Sequence[Span], *, tile_tokens: int, device: torch.device) -> LayeredPlan:
    """Attention of spans that lie side by side in one row; a tile holds at most `tile_tokens` of one of them."""
    size = cache.block_size
    firsts_R, starts_R, stops_R = np.array([(span.first, span.start, span.stop) for span in spans], dtype=np.int64).T
    lengths_R, num_pages_R = stops_R - starts_R, -(-stops_R // size)
    requests_R = np.arange(len(spans))
    table_RP = np.zeros((len(spans), num_pages_R.max()), dtype=np.int32)
    used = zip(spans, num_pages_R.tolist(), strict=True)
    table_RP[np.arange(table_RP.shape[1]) < num_pages_R[:, None]] = [
        page for span, num_pages in used for page in span.blocks[:num_pages]
    ]
    positions_T = concatenate_ranges(starts_R, lengths_R)
    pages_T = table_RP[np.repeat(requests_R, lengths_R), positions_T // size].astype(np.int64)
    num_tiles_R = -(-lengths_R // tile_tokens)
    tile_offsets_I = concatenate_ranges(np.zeros_like(starts_R), num_tiles_R) * tile_tokens
    tiles_2I = [np.repeat(requests_R, num_tiles_R), tile_offsets_I]
    tensors = [
        copy_to_device(array, device)
        for array in (
            pages_T * size + positions_T % size,
            table_RP,
            np.array([firsts_R, starts_R, stops_R], dtype=np.int32),
            np.array(tiles_2I, dtype=np.int32),
        )
    ]
    pages_of_layers = zip(cache.keys, cache.values, strict=True)
    return LayeredPlan([PrefillLayerPlan(keys, values, *tensors) for keys, values in pages_of_layers])
