"""Attention plans for CUDA devices: paged decode and paged prefill, one plan object per layer.

A layer's plan holds the layer's KV-cache blocks and the index tensors that all layers share. A traced layer therefore
reads only tensors, and all layers share one trace.

Axes: T tokens, R requests, I tiles, P KV-cache blocks, K key-value heads, Z block size, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tunesmith.engine.batch.kv_cache import KVCache, build_segments
from tunesmith.engine.core.span import Span
from tunesmith.engine.cuda import custom_ops as ops
from tunesmith.engine.cuda.decode_work import DecodeWork
from tunesmith.model.arrays import concatenate_ranges, copy_to_device, list_tiles, pad_tiles
from tunesmith.model.forward.attention import AttentionOptions, get_layer_index
from tunesmith.model.forward.recurrence import SegmentTable, SlotTable
from tunesmith.model.torch_modes import is_exact


class LayerPlan:
    """One layer's attention, or the states of a recurrent layer."""

    segments: Any = None

    def __init__(self, operation: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> None:
        """`tensors`: the layer's blocks of keys and values, and what else the operation takes after query, key and
        value (`custom_ops.py`)."""
        self.operation = operation
        self.tensors = tensors

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        return self.operation(
            query, key, value, *self.tensors, options.get_scaling(query.shape[-1]), options.sliding_window or 0,
            options.softcap or 0.0, options.sinks,
        )  # fmt: skip


class LayeredPlan:
    """The plans of all layers as one `AttentionPlan` for `run_body`."""

    def __init__(
        self,
        cache: KVCache,
        operation: Callable[..., Tensor],
        tensors: Sequence[Tensor],
        segments: SlotTable | SegmentTable | None = None,
    ) -> None:
        """All layers share the index `tensors`; `segments` are those of recurrent layers."""
        blocks = zip(cache.keys, cache.values, strict=True)
        self.layers = [LayerPlan(operation, (keys_PKZD, values_PKZD, *tensors)) for keys_PKZD, values_PKZD in blocks]
        self.segments: Any = segments
        if segments is not None:
            for index, layer in enumerate(self.layers):
                layer.segments = segments.select_layer(index)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        return self.layers[get_layer_index(module)].attend(module, query, key, value, options)


def build_decode_plan(cache: KVCache, block_table_RP: Tensor, work: DecodeWork, slots_R: Tensor) -> LayeredPlan:
    """Decode attention of requests whose last known token is at the positions of `work`."""
    segments = SlotTable(slots_R, cache.states) if cache.states else None
    if is_exact():  # attention adds in the order of prefills
        tiles_20 = block_table_RP.new_empty((2, 0))
        tensors = (work.positions_R, block_table_RP, work.positions_R.expand(3, -1), tiles_20)
        return LayeredPlan(cache, ops.paged_prefill, tensors, segments)
    tensors = (block_table_RP, work.positions_R, work.items_2WF, work.parts_2R2)
    return LayeredPlan(cache, ops.paged_decode, tensors, segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillArrays:
    """Where the tokens of spans that are concatenated in one row stand in the KV cache."""

    positions_T: NDArray[np.int64]
    slot_mapping_T: NDArray[np.int64]
    """The cache slot of each token: its block times the block size, plus its place in the block."""
    block_table_RP: NDArray[np.int32]
    spans_3R: NDArray[np.int32]
    """First token in the row, first position, and the position after the last."""
    tiles_2I: NDArray[np.int32]
    """Request, and offset of the first token within its span."""


def build_prefill_arrays(block_size: int, spans: Sequence[Span], *, tile_tokens: int) -> PrefillArrays:
    """A tile holds at most `tile_tokens` tokens of one span."""
    bounds = np.array([(span.first, span.start, span.stop) for span in spans], dtype=np.int64).reshape(-1, 3)
    _, starts_R, stops_R = bounds.T
    lengths_R, num_blocks_R = stops_R - starts_R, -(-stops_R // block_size)
    block_table_RP = np.zeros((len(spans), num_blocks_R.max(initial=0)), dtype=np.int32)
    used = zip(spans, num_blocks_R.tolist(), strict=True)
    block_table_RP[np.arange(block_table_RP.shape[1]) < num_blocks_R[:, None]] = [
        block for span, num_blocks in used for block in span.blocks[:num_blocks]
    ]
    positions_T = concatenate_ranges(starts_R, lengths_R)
    blocks_T = block_table_RP[np.repeat(np.arange(len(spans)), lengths_R), positions_T // block_size].astype(np.int64)
    return PrefillArrays(
        positions_T=positions_T,
        slot_mapping_T=blocks_T * block_size + positions_T % block_size,
        block_table_RP=block_table_RP,
        spans_3R=bounds.T.astype(np.int32),
        tiles_2I=list_tiles(starts_R, lengths_R, tile_tokens),
    )


def build_prefill_plan(cache: KVCache, spans: Sequence[Span], *, tile_tokens: int, device: torch.device) -> LayeredPlan:
    """Prefill attention of spans concatenated in one row."""
    arrays = build_prefill_arrays(cache.block_size, spans, tile_tokens=tile_tokens)
    # One request more, without tokens, and a tile of it: torch traces layers once more for an axis of size 1.
    table_RP, spans_3R = np.pad(arrays.block_table_RP, ((0, 1), (0, 0))), np.pad(arrays.spans_3R, ((0, 0), (0, 1)))
    tiles_2I = pad_tiles(arrays.tiles_2I, arrays.tiles_2I.shape[1] + 1, empty=len(spans))
    tensors = [copy_to_device(each, device) for each in (arrays.slot_mapping_T, table_RP, spans_3R, tiles_2I)]
    segments = build_segments(spans, cache.states, device) if cache.states else None
    return LayeredPlan(cache, ops.paged_prefill, tensors, segments)
