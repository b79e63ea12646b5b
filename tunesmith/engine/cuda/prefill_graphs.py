"""Prefills as CUDA graphs: one graph per number of tokens, for forwards that a GPU computes before they are queued.

The host takes tens of milliseconds to queue the kernels of a forward one by one, a GPU less to run them if model and
prompts are small. A graph is queued at once. All that it depends on is in tensors: token ids, positions, cache slots,
block tables, spans and tiles, so one graph serves any requests with up to its number of tokens. Padding tokens are
written to the scratch block, and padding tiles belong to a request without tokens.

Axes: T tokens of a graph, S slots (the maximum number of requests), P columns of the block table, I tiles, N last
tokens, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from tunesmith.engine.batch.arrays import copy_to_device
from tunesmith.engine.batch.kv_cache import KVCache
from tunesmith.engine.core.span import Span
from tunesmith.engine.cuda.attention_plans import LayeredPlan, PrefillArrays, PrefillLayerPlan, build_prefill_arrays
from tunesmith.engine.cuda.graph_capture import capture_graph
from tunesmith.model.forward.attention import run_body

CAPTURE_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
QUEUED_OPERATIONS = 8e12
"""Floating-point operations that a fast GPU computes while the host queues a forward: 20 ms at 400 TFLOP/s. Forwards of
more run without a graph, where its padding would cost more than the host's time."""


class PrefillGraphs:
    """Graphs by number of tokens, captured on first use."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        *,
        num_slots: int,
        num_columns: int,
        scratch_block: int,
        tile_tokens: int,
        installed: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Padding tokens write to `scratch_block`; `installed` runs the layers as bursts do."""
        self._model, self._cache, self._installed = model, cache, installed
        self._num_slots, self._tile_tokens = num_slots, tile_tokens
        self._scratch_slot = scratch_block * cache.block_size
        self._max_tokens = find_max_tokens(sum(each.numel() for each in model.parameters()))
        device = model.device
        self._tokens_3T = torch.zeros((3, self._max_tokens), dtype=torch.long, device=device)
        """Token ids, positions and cache slots."""
        self._block_table_SP = torch.zeros((num_slots + 1, num_columns), dtype=torch.int32, device=device)
        self._spans_3S = torch.zeros((3, num_slots + 1), dtype=torch.int32, device=device)
        """Of padding requests all is zero: they have no tokens."""
        self._tiles_2I = torch.zeros((2, self._count_tiles(self._max_tokens)), dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        """With the tensor [T, C] that each graph writes."""
        self._pool: Any = torch.cuda.graph_pool_handle()

    def clear(self) -> None:
        """Drop the graphs: parameters have moved."""
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def can_compute(self, num_tokens: int, num_spans: int) -> bool:
        """Whether a graph is faster, and the requests fit it."""
        return num_tokens <= self._max_tokens and num_spans <= self._num_slots

    def compute(self, spans: Sequence[Span], token_ids: NDArray[np.int64], last_tokens: Sequence[int]) -> Tensor:
        """Queue the forward of spans in one row; hidden states [N, C] of the tokens at the places `last_tokens`."""
        size = next(each for each in CAPTURE_TOKENS if each >= len(token_ids))
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        self._copy(build_prefill_arrays(self._cache.block_size, spans, tile_tokens=self._tile_tokens), token_ids, size)
        graph, hidden_TC = self._graphs[size]
        graph.replay()
        # a copy, since graphs of other sizes write to the same memory
        return hidden_TC[copy_to_device(np.array(last_tokens, dtype=np.int64), self._model.device)]

    def _count_tiles(self, num_tokens: int) -> int:
        """Most tiles of a row: each request may end with one that is not full."""
        return num_tokens // self._tile_tokens + min(num_tokens, self._num_slots)

    def _copy(self, arrays: PrefillArrays, token_ids: NDArray[np.int64], size: int) -> None:
        num_tokens, num_spans = len(token_ids), arrays.spans_3R.shape[1]
        tokens_3T = np.zeros((3, size), dtype=np.int64)
        tokens_3T[:, :num_tokens] = token_ids, arrays.positions_T, arrays.slot_mapping_T
        tokens_3T[2, num_tokens:] = self._scratch_slot
        tiles_2I = np.full((2, self._count_tiles(size)), self._num_slots, dtype=np.int32)  # the request without tokens
        tiles_2I[:, : arrays.tiles_2I.shape[1]] = arrays.tiles_2I
        device, num_columns = self._model.device, arrays.block_table_RP.shape[1]
        self._tokens_3T[:, :size].copy_(copy_to_device(tokens_3T, device))
        self._tiles_2I[:, : tiles_2I.shape[1]].copy_(copy_to_device(tiles_2I, device))
        if num_spans:
            self._spans_3S[:, :num_spans].copy_(copy_to_device(arrays.spans_3R, device))
            self._block_table_SP[:num_spans, :num_columns].copy_(copy_to_device(arrays.block_table_RP, device))

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture a forward of padding tokens while the device is idle."""
        torch.cuda.synchronize()
        ids_T = np.zeros(0, dtype=np.int64)
        self._copy(build_prefill_arrays(self._cache.block_size, (), tile_tokens=self._tile_tokens), ids_T, size)
        ids_1T, positions_1T, slots_1T = self._tokens_3T[:, None, :size]
        tiles_2I = self._tiles_2I[:, : self._count_tiles(size)]
        blocks = zip(self._cache.keys, self._cache.values, strict=True)
        plan = LayeredPlan(
            [
                PrefillLayerPlan(keys, values, slots_1T[0], self._block_table_SP, self._spans_3S, tiles_2I)
                for keys, values in blocks
            ]
        )
        outputs: list[Tensor] = []

        def run_step() -> None:
            outputs[:] = [run_body(self._model, ids_1T, positions_1T, plan)[0]]

        with self._installed():
            graph = capture_graph(run_step, self._pool)
        return graph, outputs[0]


def find_max_tokens(num_parameters: int) -> int:
    """Tokens up to which the host takes longer to queue a forward than a fast GPU to compute it."""
    limit = QUEUED_OPERATIONS / (2 * max(num_parameters, 1))
    return max((each for each in CAPTURE_TOKENS if each <= limit), default=CAPTURE_TOKENS[0])
