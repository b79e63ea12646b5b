"""Tokens that requests have drawn in blocks and do not list yet: a line a slot, entered for many requests at once.

Most rows of a block only go on. Their tokens wait here, as numbers, until the request ends or something asks for them.

Axes: S slots, W columns, L lines of a block, R rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FIRST_WIDTH = 256


class Drawn:
    """Token ids and logprobs by slot."""

    def __init__(self, num_slots: int) -> None:
        self._token_ids_SW = np.zeros((num_slots, FIRST_WIDTH), dtype=np.int32)
        self._logprobs_SW = np.zeros((num_slots, FIRST_WIDTH), dtype=np.float32)
        self._counts_S = np.zeros(num_slots, dtype=np.int64)

    def add(
        self, slots_R: NDArray[np.int64], token_ids_LR: NDArray[np.int32], logprobs_LR: NDArray[np.float32]
    ) -> None:
        """Append a block's lines, each row to its slot."""
        counts_R = self._counts_S[slots_R]
        lasts_R = counts_R + len(token_ids_LR)
        self._widen(int(lasts_R.max(initial=0)))
        columns_LR = counts_R + np.arange(len(token_ids_LR))[:, None]
        self._token_ids_SW[slots_R, columns_LR] = token_ids_LR
        self._logprobs_SW[slots_R, columns_LR] = logprobs_LR
        self._counts_S[slots_R] = lasts_R

    def take(self, slot: int) -> tuple[list[int], list[float]]:
        """What a slot has drawn since this was last asked."""
        count = self._counts_S[slot]
        if not count:
            return [], []
        self._counts_S[slot] = 0
        return self._token_ids_SW[slot, :count].tolist(), self._logprobs_SW[slot, :count].tolist()

    def _widen(self, num_columns: int) -> None:
        width = self._token_ids_SW.shape[1]
        if num_columns > width:
            more = ((0, 0), (0, max(num_columns - width, width)))
            self._token_ids_SW = np.pad(self._token_ids_SW, more)
            self._logprobs_SW = np.pad(self._logprobs_SW, more)
