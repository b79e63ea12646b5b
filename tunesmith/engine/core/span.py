"""Spans: the new tokens of a request in one step and the blocks of its context, for attention. Holds no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of a request, adjacent in the cache, so that one view reads them all."""

    first: int
    """The first block."""
    num_blocks: int


def extend_runs(runs: list[BlockRun], blocks: Sequence[int]) -> None:
    """Add the blocks that follow."""
    for block in blocks:
        if runs and block == runs[-1].first + runs[-1].num_blocks:
            runs[-1] = BlockRun(runs[-1].first, runs[-1].num_blocks + 1)
        else:
            runs.append(BlockRun(block, 1))


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one request in the flat row of a step."""

    first: int
    """Index of the first new token in the row."""
    start: int
    """Position of the first new token in the request."""
    stop: int
    """Position after the last new token: the length of the context."""
    blocks: list[int]
    runs: Sequence[BlockRun] = ()
    """The same blocks as contiguous runs; empty for kernels that read block tables."""
    source: int | None = None
    """Slot of the recurrent state before the first new token; None: the model has none."""
    slot: int = 0
    """Slot of the request, to which the state after its last token goes."""
    snapshots: tuple[tuple[int, int], ...] = ()
    """Positions in the span, ascending, and the slots to which the state before them goes too."""
