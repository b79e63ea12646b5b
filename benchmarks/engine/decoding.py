"""Decoding alone: bursts of steps over contexts that are already cached, with no admission and no stop conditions."""

from __future__ import annotations

import time

import numpy as np
from transformers import PreTrainedModel

from tunesmith.engine.batch.decode_burst import BurstInput
from tunesmith.engine.batch.kv_cache import KVCache, build_states
from tunesmith.engine.worker.model_runner import probe_layers
from tunesmith.model.forward.recurrence import describe_states

BLOCK_SIZE = 16


class Decoding:
    """Requests of one context length over a KV cache of random values."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_sequences: int,
        context: int,
        num_steps: int,
        mode: str,
        weight_format: str = "model",
    ) -> None:
        # needs Triton, which only CUDA machines have
        from tunesmith.engine.cuda.cuda_graphs import DecodeGraphs
        from tunesmith.engine.cuda.fp8_weights import Fp8Weights

        self._num_sequences, self._context = num_sequences, context
        num_blocks = -(-(context + num_steps + 1) // BLOCK_SIZE)
        cache = KVCache(
            probe_layers(model), num_blocks=num_sequences * num_blocks + 1, block_size=BLOCK_SIZE, dtype=model.dtype,
            device=model.device,
            states=build_states(describe_states(model), num_slots=num_sequences + 1, device=model.device),
        )  # fmt: skip
        for tensor in (*cache.keys, *cache.values):
            tensor.normal_()
        self._decoder = DecodeGraphs(
            model, cache, max_num_seqs=num_sequences, max_model_len=num_blocks * BLOCK_SIZE,
            is_compiled=mode == "compiled", fp8=Fp8Weights(model) if weight_format == "fp8" else None,
        )  # fmt: skip
        blocks = np.random.default_rng(0).permutation(num_sequences * num_blocks).reshape(num_sequences, num_blocks)
        self._decoder.input_batch.block_table_SP[:, :num_blocks] = blocks
        self._decoder.input_batch.seeds_S[:] = np.arange(num_sequences)

    def run(self, num_steps: int, burst_length: int) -> float:
        """Seconds for `num_steps` tokens of every request; bursts are read as the engine reads them, one behind."""
        rows = np.arange(self._num_sequences)
        started, before = time.perf_counter(), None
        for first in range(0, num_steps, burst_length):
            described = BurstInput(
                slots_R=rows,
                sources_R=np.full_like(rows, -1) if before is None else rows,
                token_ids_R=np.full_like(rows, 5),
                positions_R=np.full_like(rows, self._context + first),
            )
            ticket = self._decoder.launch(described, num_steps=burst_length)
            if before is not None:
                before.read()
            before = ticket
        assert before is not None
        before.read()
        return time.perf_counter() - started
