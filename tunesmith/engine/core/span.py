"""What attention knows of a request in one step: its new tokens, and the pages of its context. Holds no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageRun:
    """Pages of a request that are neighbours in the cache, so that a view reads them all."""

    first: int
    """The first of them."""
    num_pages: int


def extend_runs(runs: list[PageRun], pages: Sequence[int]) -> None:
    """Add the pages that follow."""
    for page in pages:
        if runs and page == runs[-1].first + runs[-1].num_pages:
            runs[-1] = PageRun(runs[-1].first, runs[-1].num_pages + 1)
        else:
            runs.append(PageRun(page, 1))


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one request in the step's row."""

    first: int
    """Index of the first of them in the row."""
    start: int
    """Position of the first of them in the request."""
    stop: int
    """Position after the last of them: the request's context."""
    pages: list[int]
    runs: Sequence[PageRun] = ()
    """The same pages as runs; kernels that read page tables need none."""
