"""Decoding alone: blocks of steps of requests whose contexts are there already, with nothing to admit or to end."""

from __future__ import annotations

import time

import numpy as np
from transformers import PreTrainedModel

from tunesmith.engine.batch.decode_burst import BurstInput
from tunesmith.engine.batch.kv_cache import KVCache
from tunesmith.engine.worker.model_runner import probe_layers

PAGE_SIZE = 16


class Decoding:
    """Requests of one length over a cache of random keys and values."""

    def __init__(self, model: PreTrainedModel, *, num_sequences: int, context: int, num_steps: int, mode: str) -> None:
        from tunesmith.engine.cuda.cuda_graphs import build_graphs  # needs Triton, which is there on CUDA machines only

        self._num_sequences, self._context = num_sequences, context
        num_pages = -(-(context + num_steps + 1) // PAGE_SIZE)
        cache = KVCache(
            probe_layers(model), num_blocks=num_sequences * num_pages + 1, block_size=PAGE_SIZE, dtype=model.dtype,
            device=model.device,
        )  # fmt: skip
        for tensor in (*cache.keys, *cache.values):
            tensor.normal_()
        self._decoder = build_graphs(
            model, cache, max_num_seqs=num_sequences, max_model_len=num_pages * PAGE_SIZE,
            is_compiled=mode == "compiled",
        )  # fmt: skip
        pages = np.random.default_rng(0).permutation(num_sequences * num_pages).reshape(num_sequences, num_pages)
        self._decoder.input_batch.block_table_SP[:, :num_pages] = pages
        self._decoder.input_batch.seeds_S[:] = np.arange(num_sequences)

    def run(self, num_steps: int, block: int) -> float:
        """Seconds of so many tokens of every request, read in blocks as the engine reads them."""
        rows = np.arange(self._num_sequences)
        started, before = time.perf_counter(), None
        for first in range(0, num_steps, block):
            described = BurstInput(
                slots_R=rows,
                sources_R=np.full_like(rows, -1) if before is None else rows,
                token_ids_R=np.full_like(rows, 5),
                positions_R=np.full_like(rows, self._context + first),
            )
            ticket = self._decoder.launch(described, num_steps=block)
            if before is not None:
                before.read()
            before = ticket
        assert before is not None
        before.read()
        return time.perf_counter() - started
