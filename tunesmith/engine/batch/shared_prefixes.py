"""Prefixes that requests of a decode batch share, found from their block tables.

Requests with a common prompt, or with a common system prompt, hold the same KV-cache blocks for it. Attention reads
such blocks once for several requests. The batch is a forest: a prefix is a range of tokens with the requests below it,
which are adjacent in `order_R`; a request attends to the prefixes above it and then to its own tokens.

Axes: R requests, P columns of the block table, N prefixes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MIN_SHARED_TOKENS = 512
"""Shorter ranges are read by each request: the GPU's cache has them by then, and merging parts costs more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """The shared prefixes of a batch."""

    order_R: NDArray[np.int32]
    """The requests, so that those of a prefix are adjacent."""
    starts_R: NDArray[np.int32]
    """In this order, the first token that a request attends to alone."""
    prefixes_4N: NDArray[np.int32]
    """First place in the order, number of requests, first token, and the token after the last."""


def find_shared_prefixes(
    block_table_RP: NDArray[np.int32],
    positions_R: NDArray[np.int64],
    *,
    block_size: int,
    max_members: int,
    max_prefixes: int,
) -> SharedPrefixes:
    """The prefixes that at least two requests share; a prefix of more than `max_members` requests is listed in parts.

    Only full blocks before the last token are shared. Beyond `max_prefixes` prefixes, requests read their tokens alone.
    """
    search = _Search(block_table_RP, positions_R // block_size, block_size, max_members, max_prefixes)
    search.run()
    return SharedPrefixes(
        order_R=np.array(search.order, dtype=np.int32),
        starts_R=np.array(search.starts, dtype=np.int32),
        prefixes_4N=np.array(search.prefixes, dtype=np.int32).reshape(-1, 4).T,
    )


@dataclass(slots=True)
class _Search:
    table_RP: NDArray[np.int32]
    num_full_R: NDArray[np.int64]
    """Full blocks of each request."""
    block_size: int
    max_members: int
    max_prefixes: int
    order: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    prefixes: list[tuple[int, int, int, int]] = field(default_factory=list)

    def run(self) -> None:
        self._visit_all(np.arange(len(self.num_full_R)), 0, 0)

    def _visit_all(self, members: NDArray[np.int64], num_blocks: int, start: int) -> None:
        """Order requests that share `num_blocks` blocks, of which those from token `start` on are not listed yet."""
        # A range that is worth it has the same blocks at both ends; a prefix that is cached twice may have one of them.
        column = min(num_blocks + MIN_SHARED_TOKENS // self.block_size, self.table_RP.shape[1]) - 1
        ends = self.table_RP[members, num_blocks].astype(np.int64) << 32 | self.table_RP[members, column]
        blocks = np.where(self.num_full_R[members] > column, ends, -1 - members)
        _, groups, sizes = np.unique(blocks, return_inverse=True, return_counts=True)
        for group in np.flatnonzero(sizes > 1).tolist():
            self._visit(members[groups == group], num_blocks, start)
        alone = members[sizes[groups] == 1].tolist()
        self.order += alone
        self.starts += [start] * len(alone)

    def _visit(self, members: NDArray[np.int64], num_blocks: int, start: int) -> None:
        """The same for at least two requests that share more."""
        num_blocks = self._count_shared(members, num_blocks)
        stop, num_parts = num_blocks * self.block_size, -(-len(members) // self.max_members)
        if stop - start >= MIN_SHARED_TOKENS and len(self.prefixes) + num_parts <= self.max_prefixes:
            size = -(-len(members) // num_parts)
            for first in range(0, len(members), size):
                self.prefixes.append((len(self.order) + first, min(size, len(members) - first), start, stop))
            start = stop
        self._visit_all(members, num_blocks, start)

    def _count_shared(self, members: NDArray[np.int64], num_blocks: int) -> int:
        """Full blocks that all members share."""
        limit = int(self.num_full_R[members].min())
        lead = self.table_RP[members[0], num_blocks:limit]
        is_different = (self.table_RP[members[1:], num_blocks:limit] != lead).any(axis=0)
        return num_blocks + (int(is_different.argmax()) if is_different.any() else len(lead))
