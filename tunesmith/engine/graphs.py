"""Decoding as CUDA graphs: many tokens of many requests without the host.

A graph holds one step of a bucket of requests: the unchanged model with paged decode attention, the head, the draw, and
the step's own bookkeeping, so replaying it again decodes the next token. A block of replays is launched at once; the
host then reads all its tokens and logprobs in one copy and decides what ended. Weights are updated in place, so graphs
stay valid. Rows that have ended, or are only padding, write into a scratch page that nothing reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tunesmith.engine.attention import KVCache
from tunesmith.engine.block import Block, DecodeRow
from tunesmith.engine.kernels.draw import draw_tokens
from tunesmith.engine.kernels.paged_decode import choose_num_splits, paged_decode
from tunesmith.engine.sampling import wrap_int64
from tunesmith.model.attention import get_layer_index, run_body
from tunesmith.model.logits import compute_logits

MAX_BLOCK = 64
"""Steps that can be launched at once; a request that ends within a block wastes the rest of it."""
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


class DecodePlan:
    """Attention of one new token a request, for `run_body`."""

    def __init__(self, cache: KVCache, table_RP: Tensor, positions_R: Tensor) -> None:
        self._cache = cache
        self._table_RP = table_RP
        self._positions_R = positions_R
        self._num_processors = torch.cuda.get_device_properties(table_RP.device).multi_processor_count

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
        layer = get_layer_index(module)
        output_RHD = paged_decode(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            self._cache.keys[layer],
            self._cache.values[layer],
            self._table_RP,
            self._positions_R,
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            sliding_window or 0,
            softcap or 0.0,
            choose_num_splits(query.shape[2], key.shape[1], self._num_processors),
        )
        return output_RHD[None]


class DecodeGraphs:
    """The captured steps of one model, one for each bucket of requests, made when first needed."""

    def __init__(
        self, model: PreTrainedModel, cache: KVCache, *, max_num_seqs: int, max_model_len: int, is_compiled: bool
    ) -> None:
        """The last page of the cache is the scratch page."""
        decoder = model.get_decoder()
        self._model = model
        self._decoder = torch.compile(decoder, dynamic=True) if is_compiled else decoder
        self._cache = cache
        self._scratch_page = len(cache.keys[0]) - 1
        self._max_num_seqs = max_num_seqs
        self._num_columns = -(-(max_model_len + MAX_BLOCK) // cache.page_size) + 1
        self._buckets: dict[int, _Bucket] = {}
        self._memory = torch.cuda.graph_pool_handle()

    def decode(self, rows: Sequence[DecodeRow], *, num_steps: int) -> Block:
        """Decode `num_steps` tokens of each row."""
        assert 1 <= num_steps <= MAX_BLOCK
        bucket = self._get_bucket(len(rows))
        bucket.load(rows, self._scratch_page)
        for _ in range(num_steps):
            bucket.graph.replay()
        return bucket.read(len(rows), num_steps)

    def _get_bucket(self, num_rows: int) -> _Bucket:
        size = next((size for size in BUCKETS if size >= num_rows), self._max_num_seqs)
        size = max(min(size, self._max_num_seqs), num_rows)
        if size not in self._buckets:
            bucket = _Bucket(size, self._num_columns, self._scratch_page, self._model.device)
            bucket.capture(self._model, self._decoder, self._cache, self._memory)
            self._buckets[size] = bucket
        return self._buckets[size]


class _Bucket:
    """Static inputs and outputs of one graph, and the graph."""

    def __init__(self, size: int, num_columns: int, scratch_page: int, device: torch.device) -> None:
        self.size = size
        self.graph = torch.cuda.CUDAGraph()
        self._ids_R = torch.zeros(size, dtype=torch.long, device=device)
        self._positions_R = torch.zeros(size, dtype=torch.long, device=device)
        self._seeds_R = torch.zeros(size, dtype=torch.long, device=device)
        self._temperatures_R = torch.ones(size, device=device)
        self._table_RP = torch.full((size, num_columns), scratch_page, dtype=torch.int32, device=device)
        self._step = torch.zeros(1, dtype=torch.long, device=device)
        self._token_log_LR = torch.zeros((MAX_BLOCK, size), dtype=torch.long, device=device)
        self._logprob_log_LR = torch.zeros((MAX_BLOCK, size), device=device)

    def capture(self, model: PreTrainedModel, decoder: Callable[..., Any], cache: KVCache, memory: Any) -> None:
        """Run the step twice on padding to warm up, then capture it."""
        plan = DecodePlan(cache, self._table_RP, self._positions_R)

        def run_step() -> None:
            hidden_RC = run_body(model, self._ids_R[None], self._positions_R[None], plan, decoder=decoder)[0]
            draw_tokens(
                compute_logits(model, hidden_RC),
                temperatures_R=self._temperatures_R,
                seeds_R=self._seeds_R,
                positions_R=self._positions_R,
                ids_R=self._ids_R,
                step=self._step,
                token_log_LR=self._token_log_LR,
                logprob_log_LR=self._logprob_log_LR,
            )

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                run_step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self.graph, pool=memory):
            run_step()

    def load(self, rows: Sequence[DecodeRow], scratch_page: int) -> None:
        """Fill the static inputs; rows beyond the requests are padding."""
        num_padding = self.size - len(rows)
        num_columns = self._table_RP.shape[1]
        numbers = torch.tensor(
            [
                [row.token_id for row in rows] + [0] * num_padding,
                [row.position for row in rows] + [0] * num_padding,
                [wrap_int64(row.seed) for row in rows] + [0] * num_padding,
            ]
        ).to(self._ids_R.device, non_blocking=True)
        self._ids_R.copy_(numbers[0])
        self._positions_R.copy_(numbers[1])
        self._seeds_R.copy_(numbers[2])
        self._temperatures_R.copy_(torch.tensor([row.temperature for row in rows] + [1.0] * num_padding))
        lines = [row.pages + [scratch_page] * (num_columns - len(row.pages)) for row in rows]
        lines += [[scratch_page] * num_columns] * num_padding
        self._table_RP.copy_(torch.tensor(lines, dtype=torch.int32))
        self._step.zero_()

    def read(self, num_rows: int, num_steps: int) -> Block:
        """The block's tokens; waits for the device."""
        tokens = self._token_log_LR[:num_steps, :num_rows].T.tolist()
        return Block(tokens, self._logprob_log_LR[:num_steps, :num_rows].T.tolist())
