"""How the attention of a decode step is divided among the programs of its kernel.

The host decides once a burst, from block tables and lengths: whether the batch is divided at all, which prefixes are
shared, and how long an item may be. The device lists the items at each step, because contexts grow with every replay.

Axes: R requests, S slots (the maximum number of requests), P columns of the block table, W items and their header, F
fields of an item.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunesmith.engine.batch.shared_prefixes import SharedPrefixes, find_shared_prefixes
from tunesmith.model.torch_modes import is_exact

ITEM_FIELDS = 5
"""Start, stop, number of requests, place among a request's items, and flags: 1 for the item with the new token, 2 for a
request's only item. Then come the rows of the requests, and the first partial result of each."""
MAX_STACKED_QUERIES = 16
"""Most query heads that a program multiplies with one key-value head: as many as a tensor core takes at once."""
EVEN_PROGRAMS, UNEVEN_PROGRAMS = 8, 32
"""Programs per multiprocessor up to which contexts of similar, and of different, lengths are cut. Similar ones finish
together, and each cut costs; different ones need shorter items, so that none ends late. Programs of heads smaller than
128 have less to read, so there are more of them."""
EVENNESS = 1.25
"""Contexts are similar if the longest is at most this many times the mean."""
ALIGNMENT = 64
"""Items begin at a multiple of this many tokens, as the tiles of all kernel configurations do."""
MIN_CHUNK, MIN_CHUNK_OF_MANY = 128, 512
"""Fewest tokens to which contexts are cut; the second with `MANY_PROGRAMS` per multiprocessor without any cut."""
MANY_PROGRAMS = 8
ENOUGH_PROGRAMS = 3
"""Per multiprocessor, for contexts of similar lengths: with as many, none is cut."""
MAX_PARTS = 64
"""Most items of a request's own tokens, or of a prefix: merging many partial results takes longer than it saves."""
MAX_WHOLE = 300
"""Contexts up to this length are not cut, unless there are so few that most multiprocessors would have no program."""


class Kind(Enum):
    """How contexts are divided. Each kind has graphs of its own, with as many programs as it may need."""

    WHOLE = "each context is one item"
    EVEN = "contexts of similar lengths, which share nothing, are cut into a few items each"
    UNEVEN = "contexts are cut into many items, and shared prefixes are items of their own"


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """What the host decides of a burst's items."""

    kind: Kind
    chunk: int
    """Most tokens of an item."""
    prefixes: SharedPrefixes

    def copy_to(self, division_7S: Tensor, staging_7S: Tensor) -> None:
        """Queue a copy to the device through pinned memory; nothing reads the division of whole contexts."""
        if self.kind is not Kind.WHOLE:
            self.fill(staging_7S.numpy())
            division_7S.copy_(staging_7S, non_blocking=True)

    def fill(self, division_7S: NDArray[np.int32]) -> None:
        """Write the order of requests, their first own token, the prefixes (four rows) and the chunk to an array."""
        order_R, prefixes_4N = self.prefixes.order_R, self.prefixes.prefixes_4N
        division_7S[0], division_7S[1] = np.arange(division_7S.shape[1]), 0  # rows of padding come after the requests
        division_7S[0, : len(order_R)], division_7S[1, : len(order_R)] = order_R, self.prefixes.starts_R
        division_7S[2:6] = 0  # unused prefixes have no requests
        division_7S[2:6, : prefixes_4N.shape[1]] = prefixes_4N
        division_7S[6, 0] = self.chunk


NO_PREFIXES = SharedPrefixes(
    order_R=np.zeros(0, np.int32), starts_R=np.zeros(0, np.int32), prefixes_4N=np.zeros((4, 0), np.int32)
)


class Divider:
    """Divides the batches of one model on one device."""

    def __init__(
        self, *, block_size: int, num_kv_heads: int, num_heads: int, head_size: int, num_sms: int, window: int
    ) -> None:
        """`num_sms`: multiprocessors of the device; `window`: the sliding window of some layers, 0 without one."""
        self.block_size, self.window = block_size, window
        self.num_members = max(MAX_STACKED_QUERIES * num_kv_heads // num_heads, 1)
        per_head = num_sms / num_kv_heads
        scale = max(128 / head_size, 1)
        self._few_rows, self._enough_rows = 0.5 * per_head, ENOUGH_PROGRAMS * per_head * scale
        self._many_rows = MANY_PROGRAMS * per_head
        self._num_items = {
            Kind.WHOLE: 0,
            Kind.EVEN: max(int(EVEN_PROGRAMS * per_head * scale), 1),
            Kind.UNEVEN: max(int(UNEVEN_PROGRAMS * per_head * scale), 1),
        }
        """Most items beyond one per request and prefix."""

    def divide(self, block_table_RP: NDArray[np.int32], positions_R: NDArray[np.int64], *, num_steps: int) -> Division:
        """The division of a batch for its next steps, the first of which computes the token at `positions_R` or, of a
        request that was just prefilled, the one after it."""
        if is_exact():  # sums are not divided
            return self.build_empty(Kind.WHOLE)
        lengths_R = positions_R + num_steps + 1
        if lengths_R.max(initial=0) <= MAX_WHOLE:
            is_cut = len(lengths_R) <= self._few_rows and lengths_R.max(initial=0) > ALIGNMENT
            return Division(kind=Kind.EVEN if is_cut else Kind.WHOLE, chunk=ALIGNMENT, prefixes=NO_PREFIXES)
        prefixes = find_shared_prefixes(
            block_table_RP, positions_R, block_size=self.block_size, max_members=self.num_members,
            max_prefixes=self.count_prefixes(Kind.UNEVEN, len(positions_R)),
        )  # fmt: skip
        _, _, starts_N, stops_N = prefixes.prefixes_4N
        ranges = np.concatenate([lengths_R[prefixes.order_R] - prefixes.starts_R, stops_N - starts_N])
        is_even = not len(starts_N) and ranges.max() * len(ranges) <= EVENNESS * ranges.sum()
        kind = Kind.EVEN if is_even else Kind.UNEVEN
        chunk = self._choose_chunk(kind, ranges, len(lengths_R))
        if self.window:
            chunk = max(chunk, self._choose_chunk(kind, np.minimum(lengths_R, self.window), len(lengths_R)))
        is_whole = ranges.max() <= chunk or (is_even and len(lengths_R) >= self._enough_rows)
        if is_whole and not len(starts_N):
            return self.build_empty(Kind.WHOLE)
        return Division(kind=kind, chunk=chunk, prefixes=prefixes)

    def build_empty(self, kind: Kind) -> Division:
        """The division of a batch of padding rows."""
        return Division(kind=kind, chunk=MIN_CHUNK, prefixes=NO_PREFIXES)

    def count_prefixes(self, kind: Kind, num_rows: int) -> int:
        """Most shared prefixes of a step with this many requests."""
        return num_rows // 2 if kind is Kind.UNEVEN and self.num_members > 1 else 0

    def count_items(self, kind: Kind, num_rows: int) -> int:
        """Most items of a step with this many requests."""
        return num_rows + self.count_prefixes(kind, num_rows) + self._num_items[kind]

    def _choose_chunk(self, kind: Kind, ranges: NDArray[np.int64], num_rows: int) -> int:
        """Most tokens of an item; powers of two, so that cuts, and rounding with them, rarely change."""
        total, longest = int(ranges.sum()) + ALIGNMENT * len(ranges), int(ranges.max())
        chunk = MIN_CHUNK_OF_MANY if num_rows >= self._many_rows else MIN_CHUNK
        while chunk * self._num_items[kind] < total or chunk * MAX_PARTS < longest:
            chunk *= 2
        return chunk


def find_slots(block_table_RP: Tensor, positions_R: Tensor, block_size: int) -> Tensor:
    """The cache slot of the token at each position, on the device."""
    blocks_R = block_table_RP.gather(1, (positions_R // block_size)[:, None])[:, 0]
    return blocks_R.long() * block_size + positions_R % block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWork:
    """The tensors of one captured step; those of whole contexts are empty."""

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
    def allocate(
        cls,
        divider: Divider,
        kind: Kind,
        positions_R: Tensor,
        division_7S: Tensor,
    ) -> DecodeWork:
        num_rows, device = len(positions_R), positions_R.device
        num_members = divider.num_members if kind is Kind.UNEVEN else 1
        num_windows = 0 if kind is Kind.WHOLE else 1 + (divider.window > 0)
        item_shape = (num_windows, 1 + divider.count_items(kind, num_rows), ITEM_FIELDS + 2 * num_members)
        return cls(
            positions_R=positions_R,
            division_7S=division_7S,
            items_2WF=torch.zeros(item_shape, dtype=torch.int32, device=device),
            parts_2R2=torch.zeros((num_windows, num_rows, 2), dtype=torch.int32, device=device),
            window=divider.window,
            num_prefixes=divider.count_prefixes(kind, num_rows),
            num_members=num_members,
        )


@cache
def get_num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
