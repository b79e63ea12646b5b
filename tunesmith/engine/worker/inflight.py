"""Rows of a block of steps: what is known of them when it is launched, and where they may end once it is read.

All of it is arrays with one entry a row, so that rows which only go on cost the host next to nothing.

Axes: R rows, L lines of a block, 5 numbers of a row: `SLOT`, `KNOWN`, `LIMIT`, `HAS_STOPS`, `IS_HEARD`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tunesmith.engine.batch.decode_burst import Block, Ticket
from tunesmith.engine.core.output_processor import Call

SLOT, KNOWN, LIMIT, HAS_STOPS, IS_HEARD = range(5)
"""The request's slot; its prompt and sampled tokens, those in flight among them; how many it may have; whether its end
hangs on more than these and end-of-sequence tokens; whether its call is told of tokens as they come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A block in the device's queue."""

    ticket: Ticket
    calls: list[Call]
    numbers_5R: NDArray[np.int64]
    """Tokens of this block are known ones here."""
    num_fresh: int
    """The last rows, whose first token is drawn from a prefill."""
    num_steps: int

    @property
    def is_wanted(self) -> bool:
        """Somebody waits for what it draws."""
        return any(call.request.row is not None for call in self.calls)

    def find_rows_that_go_on(self) -> list[int]:
        """Rows that go on whatever the block draws, for their calls are still there and may have more tokens."""
        has_room = (self.numbers_5R[KNOWN] < self.numbers_5R[LIMIT]).tolist()
        return [row for row, call in enumerate(self.calls) if has_room[row] and call.request.row is not None]


def collect_numbers(calls: Sequence[Call], *, num_fresh: int) -> NDArray[np.int64]:
    """Numbers [5, R] of rows that were in no block; the next token of fresh ones, which come last, is in flight."""
    rows = [
        (call.request.row, len(call.request.token_ids), call.request.limit, call.has_stops, call.on_tokens is not None)
        for call in calls
    ]
    numbers_5R = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    numbers_5R[KNOWN, len(calls) - num_fresh :] += 1
    return numbers_5R


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows of a block that have drawn as many tokens each and whose calls are still there."""

    calls: list[Call]
    slots_R: NDArray[np.int64]
    token_ids_LR: NDArray[np.int32]
    logprobs_LR: NDArray[np.float32]
    num_to_eos_R: NDArray[np.int64]
    """Tokens up to the first end-of-sequence one and with it; far more than there are where there is none."""
    is_plain_R: NDArray[np.bool_]
    """The row goes on whatever its tokens are, and every one of them is good."""
    is_heard_R: NDArray[np.bool_]
    """The call is told of its tokens now."""


def split_rows(flight: Flight, block: Block, *, eos_ids: Collection[int]) -> list[Part]:
    """The rows that had a last token before the block, and the fresh ones, which have drawn one more."""
    num_plain = len(flight.calls) - flight.num_fresh
    parts = [_find_ends(flight, block, range(num_plain, len(flight.calls)), first=0, eos_ids=eos_ids)]
    if flight.num_steps:
        parts.insert(0, _find_ends(flight, block, range(num_plain), first=1, eos_ids=eos_ids))
    return parts


def _find_ends(flight: Flight, block: Block, rows: range, *, first: int, eos_ids: Collection[int]) -> Part:
    calls = flight.calls
    chosen = np.array([row for row in rows if calls[row].request.row is not None], dtype=np.int64)
    token_ids_LR, logprobs_LR = block.token_ids_LR[first:, chosen], block.logprobs_LR[first:, chosen]
    numbers_5R = flight.numbers_5R[:, chosen]
    is_eos_LR = np.isin(token_ids_LR, list(eos_ids))
    has_eos_R = is_eos_LR.any(axis=0)
    is_sound_R = np.isfinite(logprobs_LR).all(axis=0)
    goes_on_R = (numbers_5R[KNOWN] < numbers_5R[LIMIT]) & ~has_eos_R
    return Part(
        calls=[calls[row] for row in chosen.tolist()],
        slots_R=numbers_5R[SLOT],
        token_ids_LR=token_ids_LR,
        logprobs_LR=logprobs_LR,
        num_to_eos_R=np.where(has_eos_R, is_eos_LR.argmax(axis=0) + 1, np.iinfo(np.int64).max),
        is_plain_R=goes_on_R & is_sound_R & (numbers_5R[HAS_STOPS] == 0),
        is_heard_R=numbers_5R[IS_HEARD] == 1,
    )
