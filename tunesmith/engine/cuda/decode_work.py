"""How the attention of a decode step is divided among the programs of its kernel.

The host decides once a burst, from block tables and lengths: whether the batch is divided at all, which prefixes are
shared, and how long an item may be. The device lists the items at each step, because contexts grow with every replay.

Axes: R requests, S slots (the maximum number of requests), P columns of the block table, W items and their header, F
fields of an item.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunesmith.engine.batch.shared_prefixes import SharedPrefixes, find_shared_prefixes

ITEM_FIELDS = 5
"""Start, stop, number of requests, place among a request's items, and flags: 1 for the item with the new token, 2 for a
request's only item. Then come the rows of the requests, and the first partial result of each."""
MAX_STACKED_QUERIES = 16
"""Most query heads that a program multiplies with one key-value head: as many as a tensor core takes at once."""
PROGRAMS_PER_SM = 16
"""Items are cut until each multiprocessor has about this many programs."""
ALIGNMENT = 64
"""Items begin at a multiple of this many tokens, as the tiles of all kernel configurations do."""
MIN_CHUNK = 128
"""Items are not cut shorter than this many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """What the host decides of a burst's items."""

    chunk: int
    """Most tokens of an item."""
    prefixes: SharedPrefixes

    def fill(self, division_7S: NDArray[np.int32]) -> None:
        """Write the order of requests, their first own token, the prefixes (four rows) and the chunk to an array."""
        order_R, prefixes_4N = self.prefixes.order_R, self.prefixes.prefixes_4N
        division_7S[0], division_7S[1] = np.arange(division_7S.shape[1]), 0  # rows of padding come after the requests
        division_7S[0, : len(order_R)], division_7S[1, : len(order_R)] = order_R, self.prefixes.starts_R
        division_7S[2:6] = 0  # unused prefixes have no requests
        division_7S[2:6, : prefixes_4N.shape[1]] = prefixes_4N
        division_7S[6, 0] = self.chunk


UNDIVIDED = Division(
    chunk=MIN_CHUNK,
    prefixes=SharedPrefixes(
        order_R=np.zeros(0, np.int32), starts_R=np.zeros(0, np.int32), prefixes_4N=np.zeros((4, 0), np.int32)
    ),
)
"""Of a batch of padding rows, on which a divided step is captured."""


class Divider:
    """Divides the batches of one model on one device."""

    def __init__(self, *, block_size: int, num_kv_heads: int, num_heads: int, num_sms: int, window: int) -> None:
        """`num_sms`: multiprocessors of the device; `window`: the sliding window of some layers, 0 without one."""
        self.block_size, self.window = block_size, window
        self.num_members = max(MAX_STACKED_QUERIES * num_kv_heads // num_heads, 1)
        self.budget = max(PROGRAMS_PER_SM * num_sms // num_kv_heads, 1)
        """Items beyond one per request and prefix."""

    def divide(
        self, block_table_RP: NDArray[np.int32], positions_R: NDArray[np.int64], *, num_steps: int
    ) -> Division | None:
        """The division of a batch for its next steps, the first of which computes the token at `positions_R` or, of a
        request that was just prefilled, the one after it; None if each request is one item."""
        lengths_R = positions_R + num_steps + 1
        if lengths_R.max(initial=0) <= MIN_CHUNK:
            return None
        prefixes = find_shared_prefixes(
            block_table_RP, positions_R, block_size=self.block_size, max_members=self.num_members,
            max_prefixes=self.count_prefixes(len(positions_R)),
        )  # fmt: skip
        _, _, starts_N, stops_N = prefixes.prefixes_4N
        num_tokens = int((lengths_R[prefixes.order_R] - prefixes.starts_R).sum() + (stops_N - starts_N).sum())
        if self.window:
            num_tokens = max(num_tokens, int(np.minimum(lengths_R, self.window).sum()))
        chunk = self._choose_chunk(num_tokens + ALIGNMENT * (len(lengths_R) + len(starts_N)))
        if not len(starts_N) and lengths_R.max() <= chunk:
            return None
        return Division(chunk=chunk, prefixes=prefixes)

    def count_prefixes(self, num_rows: int) -> int:
        """Most shared prefixes of a step with this many requests."""
        return num_rows // 2 if self.num_members > 1 else 0

    def _choose_chunk(self, num_tokens: int) -> int:
        """The shortest with which the items fit; powers of two, so that cuts, and rounding, rarely change."""
        chunk = MIN_CHUNK
        while chunk * self.budget < num_tokens:
            chunk *= 2
        return chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWork:
    """The tensors of one captured step; those of a step that is not divided have no items."""

    positions_R: Tensor
    division_7S: Tensor
    """As `Division.fill` writes it."""
    items_2WF: Tensor
    """Of full contexts and, if the model has a sliding window, of contexts clipped to it. The header's first field is
    the number of items."""
    parts_2R2: Tensor
    """First partial result of each request, and their number."""
    window: int
    num_prefixes: int
    num_members: int

    @classmethod
    def allocate(cls, divider: Divider, positions_R: Tensor, division_7S: Tensor, *, is_divided: bool) -> DecodeWork:
        num_rows, device = len(positions_R), positions_R.device
        num_prefixes, num_kinds = divider.count_prefixes(num_rows), (1 + (divider.window > 0)) * is_divided
        num_items = num_rows + num_prefixes + divider.budget
        return cls(
            positions_R=positions_R,
            division_7S=division_7S,
            items_2WF=_allocate((num_kinds, 1 + num_items, ITEM_FIELDS + 2 * divider.num_members), device),
            parts_2R2=_allocate((num_kinds, num_rows, 2), device),
            window=divider.window,
            num_prefixes=num_prefixes,
            num_members=divider.num_members,
        )


def _allocate(shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.zeros(tuple(shape), dtype=torch.int32, device=device)
