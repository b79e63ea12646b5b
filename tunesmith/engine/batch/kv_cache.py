"""The paged KV cache, and the attention plan of one engine step in PyTorch (on a CPU, or with `cuda_decode=eager`).

The tokens of a step form one flat row. Each layer first writes their keys and values into the cache; then they attend:
requests with one new token over views of their blocks where contexts are long, other requests with few new tokens in
batches of similar context length over gathered blocks, longer chunks one by one. What all layers need (slot mappings,
gather indices, masks) is built once per step from the block tables.

Axes: T tokens of the step, R requests of a batch, Q new tokens of a request, S context, H query heads, K key-value
heads, G query heads of one key-value head, P physical blocks, Z tokens of a block, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tunesmith.engine.batch.contiguous_attention import ContiguousBatch
from tunesmith.engine.core.span import Span
from tunesmith.errors import ConfigError
from tunesmith.model.arrays import copy_to_device
from tunesmith.model.experts import RouteRecorder
from tunesmith.model.forward.attention import AttentionOptions, attend_masked, compute_weights, get_layer_index
from tunesmith.model.forward.recurrence import Segment, SegmentTable, States

MAX_BATCHED_QUERIES = 16
"""Requests with more new tokens attend one request at a time."""
MAX_WASTED_TOKENS = 512
"""Padding tokens at which a batch of contexts is split: about the cost of one more batch per layer."""
RUN_BYTES = 1 << 18
"""Bytes of keys and values whose gathering costs as much as attending over one more contiguous run."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of one layer's keys and values."""

    num_kv_heads: int
    head_size: int


class KVCache:
    """Paged keys and values of every layer: [P, K, Z, D] for kernels that read block tables, [K, P, Z, D] for views."""

    def __init__(
        self,
        shapes: Sequence[LayerShape | None],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        is_head_major: bool = False,
        states: States | None = None,
    ) -> None:
        """The shape of a recurrent layer is None, and `states` has its states. With `is_head_major`, adjacent blocks
        hold one head's keys contiguously, so that a view can read them."""
        self.block_size = block_size
        self._block_axis = int(is_head_major)
        found = [shape or LayerShape(0, 0) for shape in shapes]
        sizes = [(num_blocks, shape.num_kv_heads, block_size, shape.head_size) for shape in found]
        if is_head_major:
            sizes = [(shape.num_kv_heads, num_blocks, block_size, shape.head_size) for shape in found]
        self.keys = [build_zeros(size, dtype, device) for size in sizes]
        self.values = [build_zeros(size, dtype, device) for size in sizes]
        self.attended_keys = next(each for each in self.keys if each.shape[-1])
        self.states = states
        self.routes: RouteRecorder | None = None

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks that may hold non-finite values: even masked, they would turn attention sums into NaN."""
        for tensor in (*self.keys, *self.values):
            tensor.index_fill_(self._block_axis, torch.tensor(list(blocks), dtype=torch.long, device=tensor.device), 0)


def build_zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU the system commits memory only when a block is first written."""
    num_bytes = math.prod(size) * dtype.itemsize
    try:
        if device.type != "cpu" or not num_bytes:
            return torch.zeros(size, dtype=dtype, device=device)
        values = np.zeros(num_bytes, dtype=np.uint8)
    except (MemoryError, ValueError, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"the KV cache has tensors of {num_bytes / 2**30:.4g} GiB, which cannot be allocated: lower "
            "engine.kv_cache_tokens, engine.kv_cache_gib or engine.page_size, or end other programs on the device"
        ) from error
    return torch.from_numpy(values).view(dtype).view(size)


def build_states(
    shapes: Mapping[int, Mapping[str, tuple[tuple[int, ...], torch.dtype]]], *, num_slots: int, device: torch.device
) -> States:
    """The recurrent states of each layer, as `describe_states` lists them, in this number of slots."""
    return {
        layer: {name: build_zeros((num_slots, *shape), dtype, device) for name, (shape, dtype) in each.items()}
        for layer, each in shapes.items()
    }


def build_segments(spans: Sequence[Span], states: States | None, device: torch.device) -> SegmentTable:
    """The segments of the spans. A span may start from a snapshot that another one of the same row leaves."""
    segments: list[Segment] = []
    index_of: dict[int, int] = {}
    for span in sorted(spans, key=attrgetter("start")):  # a snapshot is left by a span that starts earlier
        source, parent, first = span.source, None if span.source is None else index_of.get(span.source), span.start
        for position in sorted({*(position for position, _ in span.snapshots), span.stop}):
            slots = [slot for place, slot in span.snapshots if place == position]
            for slot in slots:
                index_of[slot] = len(segments)
            segments.append(
                Segment(
                    start=span.first + first - span.start,
                    end=span.first + position - span.start,
                    parent=parent,
                    source=source if parent is None else None,
                    targets=(*slots, *((span.slot,) if position == span.stop else ())),
                )
            )
            parent, first = len(segments) - 1, position
    return SegmentTable(segments, device, states)


class _SpanPlan:
    """What recurrent layers take from the spans of a step."""

    def __init__(self, cache: KVCache, spans: Sequence[Span], device: torch.device) -> None:
        self.cache, self._spans, self._device = cache, spans, device

    @cached_property
    def segments(self) -> SegmentTable:
        """Built when a recurrent layer reads it."""
        return build_segments(self._spans, self.cache.states, self._device)


class PagedAttentionPlan(_SpanPlan):
    """The `AttentionPlan` of one step, over a head-major cache.

    Spans are ordered by `get_span_order` and have their runs set.
    """

    def __init__(self, cache: KVCache, spans: Sequence[Span], device: torch.device) -> None:
        super().__init__(cache, spans, device)
        size = cache.block_size
        self._slots_T = list_slots(spans, size)
        self._slot_mappings: dict[int, Tensor] = {}
        single = [span for span in spans if span.stop - span.start == 1]
        few = [span for span in spans if 1 < span.stop - span.start <= MAX_BATCHED_QUERIES]
        self._batches: list[_GatheredBatch | ContiguousBatch] = [
            ContiguousBatch(batch, block_size=size, device=device)
            if is_contiguous
            else _GatheredBatch(batch, cache, device)
            for batch, is_contiguous in _choose_views(split_by_context(single), cache)
        ]
        self._batches += [_GatheredBatch(batch, cache, device) for batch in split_by_context(few)]
        self._chunks = [_Chunk(span, cache) for span in spans if span.stop - span.start > MAX_BATCHED_QUERIES]

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        layer = get_layer_index(module)
        keys_KPZD, values_KPZD = self.cache.keys[layer], self.cache.values[layer]
        slots = self._get_slot_mapping(key.shape[1], keys_KPZD.shape[1])
        _write(keys_KPZD, slots, key)
        _write(values_KPZD, slots, value)
        query_THD = query[0].transpose(0, 1)
        if len(self._batches) == 1 and not self._chunks:
            output_THD = self._batches[0].attend(query_THD, keys_KPZD, values_KPZD, options)
            return output_THD[None]
        output_THD = torch.empty(query_THD.shape, dtype=query.dtype, device=query.device)
        for batch in self._batches:
            output_THD[batch.first : batch.last] = batch.attend(
                query_THD[batch.first : batch.last], keys_KPZD, values_KPZD, options
            )
        for chunk in self._chunks:
            rows = slice(chunk.first, chunk.last)
            new_keys_values = (key[:, :, rows], value[:, :, rows])
            output_THD[rows] = chunk.attend(query[:, :, rows], new_keys_values, keys_KPZD, values_KPZD, options)
        return output_THD[None]

    def _get_slot_mapping(self, num_kv_heads: int, num_blocks: int) -> Tensor:
        """Index of each [T, K] vector in the cache seen as rows of D; shared by layers with equally many heads."""
        if num_kv_heads not in self._slot_mappings:
            slots_TK = self._slots_T[:, None] + np.arange(num_kv_heads) * (num_blocks * self.cache.block_size)
            self._slot_mappings[num_kv_heads] = copy_to_device(slots_TK.reshape(-1), self._device)
        return self._slot_mappings[num_kv_heads]


def get_span_order(start: int, stop: int) -> tuple[int, int]:
    """Sort key of the spans of a plan: one new token, few, many; by context length within each."""
    num_new = stop - start
    return (0 if num_new == 1 else 1 if num_new <= MAX_BATCHED_QUERIES else 2), stop


def list_slots(spans: Sequence[Span], size: int) -> np.ndarray:
    """Place of each new token in one head of a cache with blocks of this size."""
    places = ((span.blocks, position) for span in spans for position in range(span.start, span.stop))
    return np.array([blocks[position // size] * size + position % size for blocks, position in places], dtype=np.int64)


def _choose_views(batches: Sequence[list[Span]], cache: KVCache) -> Iterator[tuple[list[Span], bool]]:
    """Batches, and whether each attends over views, at one call per contiguous run, or over a gathered copy."""
    keys = cache.attended_keys
    token_bytes = 2 * keys.shape[0] * keys.shape[-1] * keys.itemsize
    viewed: list[Span] = []
    for batch in batches:
        num_runs = len({run.first for span in batch for run in span.runs})
        if len(batch) * batch[-1].stop * token_bytes >= (num_runs - 1) * RUN_BYTES:
            viewed += batch
            continue
        if viewed:
            yield viewed, True
            viewed = []
        yield batch, False
    if viewed:
        yield viewed, True


def _write(blocks_KPZD: Tensor, slots: Tensor, states_1KTD: Tensor) -> None:
    head_size = blocks_KPZD.shape[-1]
    blocks_KPZD.view(-1, head_size).index_copy_(0, slots, states_1KTD[0].transpose(0, 1).reshape(-1, head_size))


def split_by_context(spans: Sequence[Span]) -> list[list[Span]]:
    """Split spans, sorted by context length, into groups that waste little when padded to their longest context."""
    groups: list[list[Span]] = []
    wasted = 0
    for span in spans:
        if groups:
            grown = span.stop - groups[-1][-1].stop
            wasted += grown * len(groups[-1])
        if not groups or wasted > MAX_WASTED_TOKENS:
            groups.append([])
            wasted = 0
        groups[-1].append(span)
    return groups


class _GatheredBatch:
    """Requests with few new tokens, padded to their longest context and their largest number of new tokens."""

    def __init__(self, spans: list[Span], cache: KVCache, device: torch.device) -> None:
        self.first, self.last = spans[0].first, spans[-1].first + spans[-1].stop - spans[-1].start
        self._device = device
        self._num_contexts = max(span.stop for span in spans)
        self._counts = [span.stop - span.start for span in spans]
        self._num_queries = max(self._counts)
        num_blocks = -(-self._num_contexts // cache.block_size)
        self._table_RP = np.zeros((len(spans), num_blocks), dtype=np.int64)
        for row, span in enumerate(spans):
            self._table_RP[row, : len(span.blocks)] = span.blocks[:num_blocks]
        self._starts_R = np.array([span.start for span in spans])
        self._has_equal_contexts = self._num_queries == 1 and spans[0].stop == spans[-1].stop
        self._pad = self._build_padding(device) if self._num_queries > 1 else None
        self._gathers: dict[int, Tensor] = {}
        self._masks: dict[tuple[int, int, int | None], Tensor | None] = {}

    def attend(self, query_THD: Tensor, keys_KPZD: Tensor, values_KPZD: Tensor, options: AttentionOptions) -> Tensor:
        """Attention output [T, H, D] of the batch's tokens, given their queries [T, H, D]."""
        num_rows, num_kv_heads, head_size = len(self._counts), keys_KPZD.shape[0], query_THD.shape[-1]
        num_groups = query_THD.shape[1] // num_kv_heads
        gather = self._get_gather(num_kv_heads, keys_KPZD.shape[1])
        keys_BSD = _gather_blocks(keys_KPZD, gather, num_rows).narrow(1, 0, self._num_contexts)
        values_BSD = _gather_blocks(values_KPZD, gather, num_rows).narrow(1, 0, self._num_contexts)
        if self._pad is None:
            query_BLD = query_THD.reshape(num_rows * num_kv_heads, num_groups, head_size)
        else:
            query = query_THD[self._pad[0]].reshape(num_rows, self._num_queries, num_kv_heads, num_groups, head_size)
            query_BLD = query.transpose(1, 2).reshape(num_rows * num_kv_heads, -1, head_size)
        mask = self._get_mask(num_kv_heads, num_groups, options.sliding_window, query_THD.dtype)
        scores = _compute_scores(query_BLD, keys_BSD, mask, options.get_scaling(head_size), options.softcap)
        sinks = options.sinks
        if sinks is not None:
            num_repeats = query_BLD.shape[1] // num_groups
            sinks = sinks.view(num_kv_heads, num_groups, 1).repeat(num_rows, num_repeats, 1)
        output = compute_weights(scores, sinks).to(values_BSD.dtype).bmm(values_BSD)
        if self._pad is None:
            return output.view(num_rows, -1, head_size)
        output = output.view(num_rows, num_kv_heads, self._num_queries, num_groups, head_size).transpose(1, 2)
        return output.reshape(num_rows * self._num_queries, -1, head_size)[self._pad[1]]

    def _build_padding(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The token in each of the R x Q padded positions, and the padded position of each token."""
        sources, positions, first = [], [], 0
        for row, count in enumerate(self._counts):
            sources += [first + min(query, count - 1) for query in range(self._num_queries)]
            positions += [row * self._num_queries + query for query in range(count)]
            first += count
        return torch.tensor(sources, device=device), torch.tensor(positions, device=device)

    def _get_gather(self, num_kv_heads: int, num_blocks: int) -> Tensor:
        """Index of the [Z, D] blocks that form the context of each request and head."""
        if num_kv_heads not in self._gathers:
            gather_RKP = self._table_RP[:, None] + np.arange(num_kv_heads)[:, None] * num_blocks
            self._gathers[num_kv_heads] = copy_to_device(gather_RKP.reshape(-1), self._device)
        return self._gathers[num_kv_heads]

    def _get_mask(
        self, num_kv_heads: int, num_groups: int, sliding_window: int | None, dtype: torch.dtype
    ) -> Tensor | None:
        """Additive mask [R x K, Q x G, S] of 0 and -inf; None where no score is masked."""
        name = (num_kv_heads, num_groups, sliding_window)
        if name not in self._masks:
            is_windowed = sliding_window is not None and sliding_window < self._num_contexts
            if self._has_equal_contexts and not is_windowed:
                self._masks[name] = None
            else:
                self._masks[name] = self._build_mask(num_kv_heads, num_groups, sliding_window, dtype)
        return self._masks[name]

    def _build_mask(self, num_kv_heads: int, num_groups: int, sliding_window: int | None, dtype: torch.dtype) -> Tensor:
        positions_RQ1 = (self._starts_R[:, None] + np.arange(self._num_queries))[:, :, None]
        columns_S = np.arange(self._num_contexts)
        is_hidden_RQS = columns_S > positions_RQ1
        if sliding_window is not None:
            is_hidden_RQS |= columns_S <= positions_RQ1 - sliding_window
        num_groups = num_groups if self._num_queries > 1 else 1  # the mask of a single query is broadcast
        shape = (len(self._counts), num_kv_heads, self._num_queries, num_groups, self._num_contexts)
        is_hidden = copy_to_device(is_hidden_RQS[:, None, :, None], self._device).expand(shape)
        mask = torch.zeros(shape, dtype=dtype, device=self._device).masked_fill_(is_hidden, -math.inf)
        return mask.view(-1, self._num_queries * num_groups, self._num_contexts)


def _gather_blocks(blocks_KPZD: Tensor, gather: Tensor, num_rows: int) -> Tensor:
    """Contexts [R x K, P x Z, D]: each request's blocks concatenated."""
    num_kv_heads, num_blocks, block_size, head_size = blocks_KPZD.shape
    blocks = blocks_KPZD.view(num_kv_heads * num_blocks, block_size * head_size).index_select(0, gather)
    return blocks.view(num_rows * num_kv_heads, -1, head_size)


def _compute_scores(
    query_BLD: Tensor, keys_BSD: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    keys_BDS = keys_BSD.transpose(1, 2)
    if softcap is not None:
        scores = torch.tanh(query_BLD.bmm(keys_BDS) * (scaling / softcap)) * softcap
        return scores if mask is None else scores + mask
    if mask is None:
        return query_BLD.bmm(keys_BDS).mul_(scaling)
    return torch.baddbmm(mask, query_BLD, keys_BDS, alpha=scaling)


class _Chunk:
    """A prefill chunk: many new tokens of one request."""

    def __init__(self, span: Span, cache: KVCache) -> None:
        self.first, self.last = span.first, span.first + span.stop - span.start
        self._start, self._stop = span.start, span.stop
        self._runs = [slice(run.first, run.first + run.num_blocks) for run in span.runs]
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self,
        query_1HQD: Tensor,
        new_keys_values: tuple[Tensor, Tensor],
        keys_KPZD: Tensor,
        values_KPZD: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Attention output [Q, H, D]; `new_keys_values` are the chunk's own keys and values [1, K, Q, D]."""
        window = options.sliding_window
        if window is not None and window >= self._stop:
            window = None
        if self._start == 0 and window is None and options.softcap is None and options.sinks is None:
            output = functional.scaled_dot_product_attention(
                query_1HQD,
                *new_keys_values,
                is_causal=True,
                scale=options.scaling,
                enable_gqa=query_1HQD.shape[1] != new_keys_values[0].shape[1],
            )
            return output[0].transpose(0, 1)
        keys, values = (self._read(keys_KPZD), self._read(values_KPZD)) if self._start else new_keys_values
        mask = self._get_mask(window, query_1HQD.device)
        output = attend_masked(query_1HQD, keys, values, mask, options)
        return output[0].transpose(0, 1)

    def _read(self, blocks_KPZD: Tensor) -> Tensor:
        """Keys or values of the request's whole context [1, K, S, D]."""
        runs = [blocks_KPZD[:, run].flatten(1, 2) for run in self._runs]
        context_KSD = runs[0] if len(runs) == 1 else torch.cat(runs, dim=1)
        return context_KSD[None, :, : self._stop]

    def _get_mask(self, sliding_window: int | None, device: torch.device) -> Tensor:
        if sliding_window not in self._masks:
            positions_Q1 = torch.arange(self._start, self._stop, device=device)[:, None]
            distance_QS = positions_Q1 - torch.arange(self._stop, device=device)
            mask_QS = distance_QS >= 0
            self._masks[sliding_window] = (
                mask_QS if sliding_window is None else mask_QS & (distance_QS < sliding_window)
            )
        return self._masks[sliding_window]


MAX_REQUESTS = 8
"""With more requests, `PagedAttentionPlan` makes fewer calls, since it attends for several at once."""


def has_single_runs(spans: Sequence[Span]) -> bool:
    """Whether `SingleRunPlan` can attend for these spans."""
    return len(spans) <= MAX_REQUESTS and all(len(span.runs) == 1 and span.stop - span.start == 1 for span in spans)


class SingleRunPlan(_SpanPlan):
    """The `AttentionPlan` of one step, over a head-major cache."""

    def __init__(self, cache: KVCache, spans: Sequence[Span]) -> None:
        super().__init__(cache, spans, torch.device("cpu"))
        self._slots = [(span.runs[0].first * cache.block_size, span.stop) for span in spans]
        """The first token of each request in the cache, and the length of its context."""
        self._new_slots_T = torch.tensor([first + length - 1 for first, length in self._slots])

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        layer, (_, num_kv_heads, num_requests, head_size) = get_layer_index(module), key.shape
        keys_1KSD = self.cache.keys[layer].view(1, num_kv_heads, -1, head_size)
        values_1KSD = self.cache.values[layer].view(1, num_kv_heads, -1, head_size)
        keys_1KSD.index_copy_(2, self._new_slots_T, key)
        values_1KSD.index_copy_(2, self._new_slots_T, value)
        queries = query.transpose(1, 2).reshape(num_requests, 1, num_kv_heads, -1, head_size).unbind()
        outputs = []
        for query_1KGD, (first, length) in zip(queries, self._slots, strict=True):
            if options.sliding_window is not None and options.sliding_window < length:
                first, length = first + length - options.sliding_window, options.sliding_window
            keys, values = keys_1KSD.narrow(2, first, length), values_1KSD.narrow(2, first, length)
            outputs.append(attend_masked(query_1KGD, keys, values, None, options))
        output_TKGD = outputs[0] if num_requests == 1 else torch.cat(outputs)
        return output_TKGD.reshape(1, num_requests, -1, head_size)
