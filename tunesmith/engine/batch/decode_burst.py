"""The interface of a device that decodes in bursts: several decode steps between two host synchronizations.

A launch queues a burst on the device and returns; its tokens are read later, when the next burst is already queued.
Rows are described by arrays with one entry per row, so the host does no work per token.

Axes: R rows, N rows whose first token is sampled from a prefill, L lines of a burst, C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tunesmith.engine.batch.input_batch import InputBatch
from tunesmith.engine.core.span import Span
from tunesmith.model.forward.attention import AttentionPlan

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


class BurstHandle(Protocol):
    """A burst in the device's queue."""

    def read(self) -> BurstOutput:
        """Wait for the burst; the arrays are valid until two more bursts are launched."""
        ...


class BurstDecoder(Protocol):
    """Prefills and decodes on a device without synchronizing."""

    input_batch: InputBatch

    def launch(self, rows: BurstInput, *, num_steps: int) -> BurstHandle:
        """Queue `num_steps` decode steps; with 0, only the first token of prefilled rows is sampled."""
        ...

    def compute_hidden(self, spans: Sequence[Span], token_ids: Sequence[int]) -> Tensor:
        """Queue one decode step of requests that the host samples: hidden states [R, C] of one token of each, valid
        until the next call."""
        ...

    def prefill(self, spans: Sequence[Span], token_ids: Ints, last_tokens: Sequence[int]) -> Tensor | None:
        """Queue the forward of spans in one row: hidden states [N, C] of the tokens at the places `last_tokens`; None
        if it is not faster than the model's own forward."""
        ...

    def build_prefill_plan(self, spans: Sequence[Span]) -> AttentionPlan:
        """Attention of the new tokens of several requests in one flat row."""
        ...

    def installed(self) -> AbstractContextManager[None]:
        """Run the model's forward in the way that is fastest on this device."""
        ...

    def refresh(self) -> None:
        """The parameters may have changed, in place or not."""
        ...
