"""Inputs and outputs of a device that decodes in bursts: several decode steps between two host synchronizations.

A launch queues a burst on the device and returns; its tokens are read later, when the next burst is already queued.
Rows are described by arrays with one entry per row, so the host does no work per token.

Axes: R rows, N rows whose first token is sampled from a prefill, L lines of a burst, C hidden size. S slots, P columns
of the block table, G rows of a burst that hold more blocks than before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tunesmith.engine.batch.sampler import wrap_int64
from tunesmith.engine.core.request import Request
from tunesmith.model.arrays import concatenate_ranges
from tunesmith.model.forward.distribution import has_truncation


class InputBatch:
    """Sampling parameters and block tables of running requests on the host, as arrays with one line per slot.

    A slot is a request's index in these arrays while it runs. The inputs of a burst are gathered from them without a
    loop over requests; the device reads only what is copied from here.
    """

    def __init__(self, num_slots: int, *, num_columns: int, scratch_block: int) -> None:
        """Unused columns of the block table hold `scratch_block`; nothing reads that block."""
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
        """Write the blocks of a burst's requests, and all values of the last `num_new` requests, the new ones."""
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


Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstInput:
    """Rows of a burst. The last N were just prefilled: their first token is sampled from the prefill's output."""

    slots_R: Ints
    """Each request's index in the `InputBatch`."""
    sources_R: Ints
    """Row of the previous launch that samples this row's last token; -1 when that token is on the host, or none is
    sampled yet (prefilled rows)."""
    token_ids_R: Ints
    """The last token, where it is on the host."""
    positions_R: Ints
    """Position of the last token; of prefilled rows, of the last prompt token."""
    prefill_hidden: Sequence[Tensor] = ()
    """Hidden states [.., C] of the prefilled rows' last tokens, in order."""

    @property
    def num_prefilled(self) -> int:
        return sum(len(hidden) for hidden in self.prefill_hidden)


@dataclass(frozen=True, slots=True)
class BurstOutput:
    """Sampled tokens [L + 1, R] of a burst and their logprobs; a logprob that is not finite marks a failed row.

    Line 0 holds the first token of prefilled rows and is undefined for all others.
    """

    token_ids_LR: NDArray[np.int32]
    logprobs_LR: NDArray[np.float32]
    entropies_LR: NDArray[np.float32] | None = None
    """Entropies of the distributions sampled from, in nats; None unless some row asks for them."""
