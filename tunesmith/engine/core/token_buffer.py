"""Tokens of decode bursts that are not yet copied to their requests: arrays with one line per slot.

Most rows of a burst do not end in it. Their tokens stay here as arrays, appended for all rows at once, until the
request ends or its tokens are needed.

Axes: S slots, W columns, L lines of a burst, R rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

INITIAL_WIDTH = 256
"""Columns at first; the arrays at least double when a slot needs more."""


class TokenBuffer:
    """Token ids, logprobs and entropies by slot."""

    def __init__(self, num_slots: int) -> None:
        self._token_ids_SW = np.zeros((num_slots, INITIAL_WIDTH), dtype=np.int32)
        self._logprobs_SW = np.zeros((num_slots, INITIAL_WIDTH), dtype=np.float32)
        self._entropies_SW: NDArray[np.float32] | None = None
        """Allocated by the first burst with entropies."""
        self._counts_S = np.zeros(num_slots, dtype=np.int64)

    def append(
        self,
        slots_R: NDArray[np.int64],
        token_ids_LR: NDArray[np.int32],
        logprobs_LR: NDArray[np.float32],
        entropies_LR: NDArray[np.float32] | None = None,
    ) -> None:
        """Append a burst's lines, each row to its slot; a burst without entropies leaves them undefined."""
        counts_R = self._counts_S[slots_R]
        ends_R = counts_R + len(token_ids_LR)
        self._widen(int(ends_R.max(initial=0)))
        columns_LR = counts_R + np.arange(len(token_ids_LR))[:, None]
        self._token_ids_SW[slots_R, columns_LR] = token_ids_LR
        self._logprobs_SW[slots_R, columns_LR] = logprobs_LR
        if entropies_LR is not None:
            if self._entropies_SW is None:
                self._entropies_SW = np.zeros_like(self._logprobs_SW)
            self._entropies_SW[slots_R, columns_LR] = entropies_LR
        self._counts_S[slots_R] = ends_R

    def read_entropies(self, slot: int) -> tuple[float, ...]:
        """The entropies of a slot's tokens, which `take` removes; empty if no burst had any."""
        return () if self._entropies_SW is None else tuple(self._entropies_SW[slot, : self._counts_S[slot]].tolist())

    def read(self, slot: int) -> tuple[list[int], list[float]]:
        """A slot's token ids and logprobs."""
        count = self._counts_S[slot]
        return self._token_ids_SW[slot, :count].tolist(), self._logprobs_SW[slot, :count].tolist()

    def take(self, slot: int) -> tuple[list[int], list[float]]:
        """Remove and return a slot's token ids and logprobs."""
        count = self._counts_S[slot]
        if not count:
            return [], []
        self._counts_S[slot] = 0
        return self._token_ids_SW[slot, :count].tolist(), self._logprobs_SW[slot, :count].tolist()

    def _widen(self, num_columns: int) -> None:
        width = self._token_ids_SW.shape[1]
        if num_columns > width:
            padding = ((0, 0), (0, max(num_columns - width, width)))
            self._token_ids_SW = np.pad(self._token_ids_SW, padding)
            self._logprobs_SW = np.pad(self._logprobs_SW, padding)
            if self._entropies_SW is not None:
                self._entropies_SW = np.pad(self._entropies_SW, padding)
