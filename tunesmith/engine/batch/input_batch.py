"""Sampling parameters and block tables of running requests, as arrays with one line per slot.

A slot is a request's index in these arrays while it runs. The inputs of a burst are gathered from them without a loop
over requests; the device reads only what is copied from here.

Axes: S slots, P columns of the block table, R requests of a burst, G those of them that hold more blocks than before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tunesmith.engine.batch.arrays import concatenate_ranges
from tunesmith.engine.batch.sampler import wrap_int64
from tunesmith.engine.core.request import Request
from tunesmith.model.forward.distribution import has_truncation


class InputBatch:
    """Host arrays by slot."""

    def __init__(self, num_slots: int, *, num_columns: int, scratch_block: int) -> None:
        """Unused columns of the block table hold `scratch_block`, which nothing reads."""
        self.seeds_S = np.zeros(num_slots, dtype=np.int64)
        self.temperatures_S = np.ones(num_slots, dtype=np.float32)
        self.top_ks_S = np.zeros(num_slots, dtype=np.int64)
        self.top_ps_S = np.ones(num_slots, dtype=np.float32)
        self.min_ps_S = np.zeros(num_slots, dtype=np.float32)
        self.has_truncation_S = np.zeros(num_slots, dtype=np.bool_)
        """Top-k, top-p or min-p removes tokens before sampling."""
        self.has_entropy_S = np.zeros(num_slots, dtype=np.bool_)
        """The request asks for the entropy of its distributions."""
        self.block_table_SP = np.full((num_slots, num_columns), scratch_block, dtype=np.int32)
        self.scratch_block = scratch_block
        self._num_blocks_S = np.zeros(num_slots, dtype=np.int64)

    def update(self, requests: Sequence[Request], *, num_new: int) -> None:
        """Write the blocks of a burst's requests, and all values of the last `num_new`, which are new in the batch."""
        # only what has changed is written: most rows of a burst were in the one before, and have no new blocks
        for request in requests[len(requests) - num_new :]:
            self._add(request)
        slots_R = np.array([request.slot for request in requests], dtype=np.int64)
        num_blocks_R = np.array([len(request.blocks) for request in requests], dtype=np.int64)
        grown_G = np.flatnonzero(num_blocks_R > self._num_blocks_S[slots_R])
        slots_G = slots_R[grown_G]
        firsts_G = self._num_blocks_S[slots_G]
        added = [requests[row].blocks[first:] for row, first in zip(grown_G.tolist(), firsts_G.tolist(), strict=True)]
        counts_G = num_blocks_R[grown_G] - firsts_G
        entries = np.repeat(slots_G, counts_G), concatenate_ranges(firsts_G, counts_G)
        self.block_table_SP[entries] = [block for blocks in added for block in blocks]
        self._num_blocks_S[slots_R] = num_blocks_R

    def _add(self, request: Request) -> None:
        slot, distribution = request.slot, request.sampling.distribution
        assert slot is not None
        self.seeds_S[slot] = wrap_int64(request.sampling.seed)
        self.temperatures_S[slot] = distribution.temperature
        self.top_ks_S[slot] = distribution.top_k
        self.top_ps_S[slot] = distribution.top_p
        self.min_ps_S[slot] = distribution.min_p
        self.has_truncation_S[slot] = has_truncation(distribution)
        self.has_entropy_S[slot] = request.sampling.return_entropy
        self.block_table_SP[slot] = self.scratch_block
        self._num_blocks_S[slot] = 0
