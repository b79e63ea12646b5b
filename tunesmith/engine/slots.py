"""Numbers of running requests as arrays, one line a slot: what a block of steps needs, gathered without a loop.

A slot is the scheduler's `row` of a request. The device knows slots only by what is copied from here.

Axes: S slots, P columns of the page table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tunesmith.engine.request import Request
from tunesmith.engine.sampling import truncates, wrap_int64


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
        self._owners: list[tuple[Request, int] | None] = [None] * num_slots

    def update(self, requests: Sequence[Request]) -> None:
        """Take in requests that are new in their slot, and pages that were added since."""
        for request in requests:
            slot = request.row
            assert slot is not None
            if self._owners[slot] != (request, request.num_starts):
                self._enter(slot, request)
            num_known = int(self._num_pages_S[slot])
            if len(request.pages) > num_known:
                self.table_SP[slot, num_known : len(request.pages)] = request.pages[num_known:]
                self._num_pages_S[slot] = len(request.pages)

    def _enter(self, slot: int, request: Request) -> None:
        distribution = request.sampling.distribution
        self._owners[slot] = (request, request.num_starts)
        self.seeds_S[slot] = wrap_int64(request.sampling.seed)
        self.temperatures_S[slot] = distribution.temperature
        self.top_ks_S[slot] = distribution.top_k
        self.top_ps_S[slot] = distribution.top_p
        self.min_ps_S[slot] = distribution.min_p
        self.is_cut_S[slot] = truncates(distribution)
        self.table_SP[slot] = self.scratch_page
        self._num_pages_S[slot] = 0
