"""Forwards as CUDA graphs that end before the head: decode steps of tokens that the host samples, and prefills.

Their inputs are separate from those of bursts, because a burst may be in the device's queue, and its last tokens are
the input of the next one.

Axes: S slots (the maximum number of rows), R rows of a step, P columns of the block table, T tokens of a graph, I
tiles, N last tokens, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from tunesmith.engine.batch.kv_cache import KVCache
from tunesmith.engine.core.span import Span
from tunesmith.engine.cuda.attention_plans import LayeredPlan, build_decode_plan, build_prefill_arrays
from tunesmith.engine.cuda.custom_ops import paged_prefill
from tunesmith.engine.cuda.decode_work import DecodeWork, Divider, Division, Kind
from tunesmith.engine.cuda.kernels.paged_decode import list_items
from tunesmith.model.arrays import copy_to_device, pad_tiles
from tunesmith.model.forward.attention import run_body
from tunesmith.model.forward.graph_store import CapturedGraph, GraphStore

# A decode step of few rows takes the time of reading the weights, so up to 64 rows sizes may double.
# In larger steps padding rows are computed at a price, so sizes grow by a half at most, and by a quarter from 512 on.
# There is no size 1: torch traces layers once more for it, since it takes an axis of size 1 for a constant.
CAPTURE_SIZES = (2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphContext:
    """The model and the KV cache that graphs read, and the sizes of their inputs."""

    model: PreTrainedModel
    cache: KVCache
    num_slots: int
    """Maximum number of requests of a forward."""
    num_columns: int
    """Columns of a block table."""
    scratch_block: int
    """The cache block to which padding is written, and which nothing reads."""
    tile_tokens: int
    """Tokens of a tile of the prefill kernel."""
    divider: Divider
    installed: Callable[[], AbstractContextManager[None]]
    """Replaces the layers by fused ones, if the engine has them."""


def choose_capture_size(num_rows: int, num_slots: int) -> int:
    """The smallest captured batch size for `num_rows` rows; at most `num_slots`."""
    size = next((size for size in CAPTURE_SIZES if size >= num_rows), num_slots)
    return max(min(size, num_slots), num_rows)


class HiddenGraphs:
    """One decode step by batch size, captured on first use.

    Requests with penalties, a grammar, a logit bias or top logprobs need the host between two tokens, so head and
    sampling are not in the graph, other than in bursts.
    """

    def __init__(self, context: GraphContext) -> None:
        self._context = context
        num_slots, num_columns, device = context.num_slots, context.num_columns, context.model.device
        self._integers_3S = torch.zeros((3, num_slots), dtype=torch.long, device=device)
        """Token ids, positions, and slots of recurrent states."""
        self._block_table_SP = torch.zeros((num_slots, num_columns), dtype=torch.int32, device=device)
        self._host_integers_3S = torch.zeros((3, num_slots), dtype=torch.long, pin_memory=True)
        self._host_table_SP = torch.zeros((num_slots, num_columns), dtype=torch.int32, pin_memory=True)
        self._division_7S = torch.zeros((7, num_slots), dtype=torch.int32, device=device)
        self._host_division_7S = torch.zeros((7, num_slots), dtype=torch.int32, pin_memory=True)
        self._copied = torch.cuda.Event()
        """Recorded after the last copy from the host buffers."""
        self._graphs: GraphStore[tuple[Tensor, DecodeWork, LayeredPlan]] = GraphStore(context.model)
        """Keys: the batch size, and how attention is divided. Each writes hidden states [R, C]; the items of attention
        are kept with it."""

    def compute(self, spans: Sequence[Span], token_ids: Sequence[int]) -> Tensor:
        """Queue a step; hidden states [R, C] of one token per request, valid until the next call is queued."""
        size = choose_capture_size(len(spans), self._context.num_slots)
        # the host buffers are written again only when the device has read them; its computation need not be over
        self._copied.synchronize()
        self._fill(spans, token_ids, size)
        positions_R, table_RP = self._host_integers_3S[1, : len(spans)], self._host_table_SP[: len(spans)]
        division = self._context.divider.divide(table_RP.numpy(), positions_R.numpy(), num_steps=1)
        graph = self._graphs.find((size, division.kind))
        if graph is None:
            graph = self._capture(size, division.kind)
            self._fill(spans, token_ids, size)
        self._copy(size, division)
        self._copied.record()
        hidden_RC, _, _ = graph.replay()
        return hidden_RC[: len(spans)]

    def _fill(self, spans: Sequence[Span], token_ids: Sequence[int], size: int) -> None:
        integers, table = self._host_integers_3S.numpy(), self._host_table_SP.numpy()
        integers[:, :size] = [[0], [0], [self._context.num_slots]]
        table[:size] = self._context.scratch_block
        integers[0, : len(spans)] = token_ids
        integers[1:, : len(spans)] = [[span.start for span in spans], [span.slot for span in spans]]
        for row, span in enumerate(spans):
            table[row, : len(span.blocks)] = span.blocks

    def _copy(self, size: int, division: Division) -> None:
        self._integers_3S.copy_(self._host_integers_3S, non_blocking=True)
        self._block_table_SP[:size].copy_(self._host_table_SP[:size], non_blocking=True)
        division.copy_to(self._division_7S, self._host_division_7S)

    def _capture(self, size: int, kind: Kind) -> CapturedGraph[tuple[Tensor, DecodeWork, LayeredPlan]]:
        """Capture a step on padding rows while the device is idle."""
        torch.cuda.synchronize()
        context = self._context
        self._fill((), (), size)
        self._copy(size, context.divider.build_empty(kind))
        torch.cuda.synchronize()  # the next request's inputs go through the same host buffers
        ids_R, positions_R, slots_R = self._integers_3S[:, :size]
        table_RP = self._block_table_SP[:size]
        work = DecodeWork.allocate(context.divider, kind, positions_R, self._division_7S)
        plan = build_decode_plan(context.cache, table_RP, work, slots_R)

        def run_step() -> tuple[Tensor, DecodeWork, LayeredPlan]:
            list_items(work)
            # nothing else holds the tensors of `work` and `plan`, whose addresses are in the graph
            return run_body(context.model, ids_R[None], positions_R[None], plan)[0], work, plan

        with context.installed():
            return self._graphs.capture((size, kind), run_step)


# Padding tokens are computed like others, so from 64 tokens on each size is at most half as large again as the last.
CAPTURE_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
QUEUED_OPERATIONS = 8e12
"""Floating-point operations that a fast GPU computes while the host queues a forward: 20 ms at 400 TFLOP/s. Forwards of
more run without a graph, where its padding would cost more than the host's time."""


class PrefillGraphs:
    """Prefills by number of tokens, captured on first use: for forwards that a GPU computes before they are queued.

    The host takes tens of milliseconds to queue the kernels of a forward one by one, a GPU less to run them if model
    and prompts are small. A graph is queued at once. All that it depends on is in tensors: token ids, positions, cache
    slots, block tables, spans and tiles, so one graph serves any requests with up to its number of tokens. Padding
    tokens are written to the scratch block, and padding tiles belong to a request without tokens.
    """

    def __init__(self, context: GraphContext) -> None:
        self._context = context
        num_slots, device = context.num_slots, context.model.device
        self._max_tokens = find_max_tokens(sum(each.numel() for each in context.model.parameters()))
        self._tokens_3T = torch.zeros((3, self._max_tokens), dtype=torch.long, device=device)
        """Token ids, positions and cache slots."""
        self._block_table_SP = torch.zeros((num_slots + 1, context.num_columns), dtype=torch.int32, device=device)
        self._spans_3S = torch.zeros((3, num_slots + 1), dtype=torch.int32, device=device)
        """Padding requests have no tokens: all of their entries are zero."""
        self._tiles_2I = torch.zeros((2, self._count_tiles(self._max_tokens)), dtype=torch.int32, device=device)
        self._graphs: GraphStore[Tensor] = GraphStore(context.model)
        """Each writes hidden states [T, C]."""

    def can_compute(self, num_tokens: int, num_spans: int) -> bool:
        """Whether a graph is faster, and the requests fit it."""
        return num_tokens <= self._max_tokens and num_spans <= self._context.num_slots

    def compute(self, spans: Sequence[Span], token_ids: NDArray[np.int64], last_tokens: Sequence[int]) -> Tensor:
        """Queue the forward of spans in one row; hidden states [N, C] of the tokens at the places `last_tokens`."""
        size = next(each for each in CAPTURE_TOKENS if each >= len(token_ids))
        graph = self._graphs.find(size) or self._capture(size)
        self._copy(spans, token_ids, size)
        hidden_TC = graph.replay()
        # a copy, since graphs of other sizes write to the same memory
        return hidden_TC[copy_to_device(np.array(last_tokens, dtype=np.int64), hidden_TC.device)]

    def _count_tiles(self, num_tokens: int) -> int:
        """Most tiles of a row: each request may end with one that is not full."""
        return num_tokens // self._context.tile_tokens + min(num_tokens, self._context.num_slots)

    def _copy(self, spans: Sequence[Span], token_ids: NDArray[np.int64], size: int) -> None:
        context = self._context
        arrays = build_prefill_arrays(context.cache.block_size, spans, tile_tokens=context.tile_tokens)
        num_tokens, num_spans = len(token_ids), len(spans)
        tokens_3T = np.zeros((3, size), dtype=np.int64)
        tokens_3T[:, :num_tokens] = token_ids, arrays.positions_T, arrays.slot_mapping_T
        tokens_3T[2, num_tokens:] = context.scratch_block * context.cache.block_size
        tiles_2I = pad_tiles(arrays.tiles_2I, self._count_tiles(size), empty=context.num_slots)
        device, num_columns = self._tokens_3T.device, arrays.block_table_RP.shape[1]
        self._tokens_3T[:, :size].copy_(copy_to_device(tokens_3T, device))
        self._tiles_2I[:, : tiles_2I.shape[1]].copy_(copy_to_device(tiles_2I, device))
        if num_spans:
            self._spans_3S[:, :num_spans].copy_(copy_to_device(arrays.spans_3R, device))
            self._block_table_SP[:num_spans, :num_columns].copy_(copy_to_device(arrays.block_table_RP, device))

    def _capture(self, size: int) -> CapturedGraph[Tensor]:
        """Capture a forward of padding tokens while the device is idle."""
        torch.cuda.synchronize()
        self._copy((), np.zeros(0, dtype=np.int64), size)
        context = self._context
        ids_1T, positions_1T, slots_1T = self._tokens_3T[:, None, :size]
        tiles_2I = self._tiles_2I[:, : self._count_tiles(size)]
        tensors = (slots_1T[0], self._block_table_SP, self._spans_3S, tiles_2I)
        plan = LayeredPlan(context.cache, paged_prefill, tensors)
        with context.installed():
            return self._graphs.capture(size, lambda: run_body(context.model, ids_1T, positions_1T, plan)[0])


def find_max_tokens(num_parameters: int) -> int:
    """Tokens up to which the host takes longer to queue a forward than a fast GPU to compute it."""
    limit = QUEUED_OPERATIONS / (2 * max(num_parameters, 1))
    return max((each for each in CAPTURE_TOKENS if each <= limit), default=CAPTURE_TOKENS[0])
