"""Numbers of running requests as arrays, one line a slot: what a block of steps needs, gathered without a loop.

A slot is the scheduler's `row` of a request. The device knows slots only by what is copied from here.

Axes: S slots, P columns of the page table, R requests of a block, G those of them that hold more pages than before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tunesmith.engine.batch.arrays import join_ranges
from tunesmith.engine.batch.sampler import truncates, wrap_int64
from tunesmith.engine.core.request import Request


class Slots:
    """Tables of the host."""

    def __init__(self, num_slots: int, *, num_columns: int, scratch_page: int) -> None:
        """Columns of the page table that hold no page name the scratch page, which nothing reads."""
        self.seeds_S = np.zeros(num_slots, dtype=np.int64)
        self.temperatures_S = np.ones(num_slots, dtype=np.float32)
        self.top_ks_S = np.zeros(num_slots, dtype=np.int64)
        self.top_ps_S = np.ones(num_slots, dtype=np.float32)
        self.min_ps_S = np.zeros(num_slots, dtype=np.float32)
        self.is_cut_S = np.zeros(num_slots, dtype=np.bool_)
        """The row drops tokens before it draws."""
        self.table_SP = np.full((num_slots, num_columns), scratch_page, dtype=np.int32)
        self.scratch_page = scratch_page
        self._num_pages_S = np.zeros(num_slots, dtype=np.int64)

    def update(self, requests: Sequence[Request], *, num_new: int) -> None:
        """Take in the requests of a block, the last `num_new` of which were not in the one before, and their pages."""
        for request in requests[len(requests) - num_new :]:
            self._enter(request)
        slots_R = np.array([request.row for request in requests], dtype=np.int64)
        num_pages_R = np.array([len(request.pages) for request in requests], dtype=np.int64)
        grown_G = np.flatnonzero(num_pages_R > self._num_pages_S[slots_R])
        slots_G = slots_R[grown_G]
        firsts_G = self._num_pages_S[slots_G]
        fresh = [requests[row].pages[first:] for row, first in zip(grown_G.tolist(), firsts_G.tolist(), strict=True)]
        counts_G = num_pages_R[grown_G] - firsts_G
        places = np.repeat(slots_G, counts_G), join_ranges(firsts_G, counts_G)
        self.table_SP[places] = [page for pages in fresh for page in pages]
        self._num_pages_S[slots_R] = num_pages_R

    def _enter(self, request: Request) -> None:
        slot, distribution = request.row, request.sampling.distribution
        assert slot is not None
        self.seeds_S[slot] = wrap_int64(request.sampling.seed)
        self.temperatures_S[slot] = distribution.temperature
        self.top_ks_S[slot] = distribution.top_k
        self.top_ps_S[slot] = distribution.top_p
        self.min_ps_S[slot] = distribution.min_p
        self.is_cut_S[slot] = truncates(distribution)
        self.table_SP[slot] = self.scratch_page
        self._num_pages_S[slot] = 0
