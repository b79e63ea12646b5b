"""What a device that decodes many tokens at once is given, and what comes back.

A launch puts a block of steps into the device's queue and returns; its tokens are read later, when the next block is
queued already. Rows are described by arrays, one entry a row, so that the host does nothing for single tokens.

Axes: R rows, N rows whose first token is drawn from a prefill, L lines of a block, C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tunesmith.engine.batch.input_batch import Slots
from tunesmith.engine.core.span import Span
from tunesmith.model.forward.attention import AttentionPlan

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRows:
    """The requests of a block. The last `N` rows are fresh: their first token is drawn from what a prefill left."""

    slots_R: Ints
    """Lines of the host's tables."""
    sources_R: Ints
    """Which row of the launch before drew the last token; -1 where the host knows it, or the row is fresh."""
    token_ids_R: Ints
    """The last known token where the host knows it."""
    positions_R: Ints
    """Where the last known or drawn token stands; of fresh rows, the last prefilled one."""
    fresh_hidden: Sequence[Tensor] = ()
    """Hidden states [.., C] of the fresh rows' last tokens, in order."""

    @property
    def num_fresh(self) -> int:
        return sum(len(hidden) for hidden in self.fresh_hidden)


@dataclass(frozen=True, slots=True)
class Block:
    """Tokens [L + 1, R] of a block and their logprobs; a logprob that is not finite marks a broken row.

    Line 0 holds the first token of fresh rows and nothing of others.
    """

    token_ids_LR: NDArray[np.int32]
    logprobs_LR: NDArray[np.float32]


class Ticket(Protocol):
    """A block in the device's queue."""

    def read(self) -> Block:
        """Wait for it; the arrays are good until two more blocks are launched."""
        ...


class BlockDecoder(Protocol):
    """Prefills and decodes on a device without waiting for it."""

    slots: Slots

    def launch(self, rows: BlockRows, *, num_steps: int) -> Ticket:
        """Queue a block of so many steps; 0 draws fresh rows only."""
        ...

    def build_prefill_plan(self, spans: Sequence[Span]) -> AttentionPlan:
        """Attention of new tokens that lie side by side in one row."""
        ...

    def installed(self) -> AbstractContextManager[None]:
        """Run the model's forward as this device does it best."""
        ...

    def refresh(self) -> None:
        """The parameters may have changed, in place or not."""
        ...
