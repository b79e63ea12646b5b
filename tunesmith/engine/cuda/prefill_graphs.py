"""Prefills as CUDA graphs: one graph per number of tokens, for forwards that a GPU computes before they are queued.

The host takes tens of milliseconds to queue the kernels of a forward one by one, a GPU less to run them if model and
prompts are small. A graph is queued at once. All that it depends on is in tensors: token ids, positions, cache slots,
block tables, spans and tiles, so one graph serves any requests with up to its number of tokens. Padding tokens are
written to the scratch block, and padding tiles belong to a request without tokens.

Axes: T tokens of a graph, S slots (the maximum number of requests), P columns of the block table, I tiles, N last
tokens, C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunesmith.engine.batch.arrays import copy_to_device
from tunesmith.engine.core.span import Span
from tunesmith.engine.cuda.attention_plans import LayeredPlan, PrefillLayerPlan, build_prefill_arrays
from tunesmith.engine.cuda.graph_inputs import GraphContext
from tunesmith.model.forward.attention import run_body
from tunesmith.model.forward.graph_store import CapturedGraph, GraphStore

# Padding tokens are computed like others, so from 64 tokens on each size is at most half as large again as the last.
CAPTURE_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
QUEUED_OPERATIONS = 8e12
"""Floating-point operations that a fast GPU computes while the host queues a forward: 20 ms at 400 TFLOP/s. Forwards of
more run without a graph, where its padding would cost more than the host's time."""


class PrefillGraphs:
    """Graphs by number of tokens, captured on first use."""

    def __init__(self, context: GraphContext) -> None:
        self._context = context
        num_slots, device = context.num_slots, context.model.device
        self._max_tokens = find_max_tokens(sum(each.numel() for each in context.model.parameters()))
        self._tokens_3T = torch.zeros((3, self._max_tokens), dtype=torch.long, device=device)
        """Token ids, positions and cache slots."""
        self._block_table_SP = torch.zeros((num_slots + 1, context.num_columns), dtype=torch.int32, device=device)
        self._spans_3S = torch.zeros((3, num_slots + 1), dtype=torch.int32, device=device)
        """Of padding requests all is zero: they have no tokens."""
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
        tiles_2I = np.full(
            (2, self._count_tiles(size)), context.num_slots, dtype=np.int32
        )  # the request without tokens
        tiles_2I[:, : arrays.tiles_2I.shape[1]] = arrays.tiles_2I
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
        blocks = zip(context.cache.keys, context.cache.values, strict=True)
        plan = LayeredPlan(
            [
                PrefillLayerPlan(keys, values, slots_1T[0], self._block_table_SP, self._spans_3S, tiles_2I)
                for keys, values in blocks
            ]
        )
        with context.installed():
            return self._graphs.capture(size, lambda: run_body(context.model, ids_1T, positions_1T, plan)[0])


def find_max_tokens(num_parameters: int) -> int:
    """Tokens up to which the host takes longer to queue a forward than a fast GPU to compute it."""
    limit = QUEUED_OPERATIONS / (2 * max(num_parameters, 1))
    return max((each for each in CAPTURE_TOKENS if each <= limit), default=CAPTURE_TOKENS[0])
