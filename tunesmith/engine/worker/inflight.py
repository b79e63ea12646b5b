"""A decode burst in flight: what is known of its rows at launch, and which of them may end once it is read.

Everything is held in arrays with one entry per row, so rows that continue cost the host almost nothing.

Axes: R rows, L lines of a burst.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.engine.batch.decode_burst import BurstHandle, BurstOutput
from tunesmith.engine.core.output_processor import RequestState

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstRows:
    """Rows of a burst, one entry per row."""

    slots_R: Ints
    num_tokens_R: Ints
    """Prompt and sampled tokens of the request, those in flight included."""
    max_num_tokens_R: Ints
    """`Request.max_num_tokens`."""
    has_stops_R: Bools
    """The request has stop strings or stop token ids."""
    is_streaming_R: Bools
    """The request has an `on_tokens` callback."""

    def select(self, rows: Sequence[int] | Ints) -> BurstRows:
        """These rows, in this order."""
        index = np.asarray(rows, dtype=np.int64)
        return BurstRows(**{name: values[index] for name, values in self._list_arrays()})

    def append(self, other: BurstRows) -> BurstRows:
        """The rows of both."""
        return BurstRows(
            **{name: np.concatenate([values, getattr(other, name)]) for name, values in self._list_arrays()}
        )

    def advance(self, num_steps: int) -> BurstRows:
        """The rows with `num_steps` more tokens in flight."""
        return replace(self, num_tokens_R=self.num_tokens_R + num_steps)

    def _list_arrays(self) -> list[tuple[str, NDArray[Any]]]:
        return [(name, getattr(self, name)) for name in self.__slots__]


def collect_rows(states: Sequence[RequestState], *, num_prefilled: int) -> BurstRows:
    """Rows that are in no burst yet; the last `num_prefilled` have their next token in flight."""
    num_tokens_R = np.array([len(state.request.token_ids) for state in states], dtype=np.int64)
    num_tokens_R[len(states) - num_prefilled :] += 1
    return BurstRows(
        slots_R=np.array([state.request.slot for state in states], dtype=np.int64),
        num_tokens_R=num_tokens_R,
        max_num_tokens_R=np.array([state.request.max_num_tokens for state in states], dtype=np.int64),
        has_stops_R=np.array([state.stops.has_stops for state in states], dtype=np.bool_),
        is_streaming_R=np.array([state.on_tokens is not None for state in states], dtype=np.bool_),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InflightBurst:
    """A burst in the device's queue."""

    handle: BurstHandle
    states: list[RequestState]
    rows: BurstRows
    """`num_tokens_R` includes the tokens of this burst."""
    num_prefilled: int
    """The last rows, whose first token is sampled from a prefill."""
    num_steps: int

    @property
    def has_running_requests(self) -> bool:
        return any(state.request.slot is not None for state in self.states)

    def find_continuing_rows(self) -> list[int]:
        """Rows whose request still runs and has not reached its length limit: they may be in the next burst."""
        has_room = (self.rows.num_tokens_R < self.rows.max_num_tokens_R).tolist()
        return [row for row, state in enumerate(self.states) if has_room[row] and state.request.slot is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOutput:
    """Tokens of those rows of a burst that sampled equally many tokens and whose requests still run."""

    states: list[RequestState]
    slots_R: Ints
    token_ids_LR: NDArray[np.int32]
    logprobs_LR: NDArray[np.float32]
    entropies_LR: NDArray[np.float32] | None
    """None: no row of the burst asks for them."""
    num_to_eos_R: Ints
    """Tokens up to and including the first end-of-sequence token; the largest int64 where there is none."""
    is_continuing_R: Bools
    """The row certainly continues after these tokens, and all of them are finite: nothing else needs checking."""
    is_streaming_R: Bools
    """The request has an `on_tokens` callback."""


def split_output(burst: InflightBurst, output: BurstOutput, *, eos_ids: Collection[int]) -> list[RowsOutput]:
    """Rows that were decoding before the burst, and prefilled rows, which sampled one token more."""
    num_decoding = len(burst.states) - burst.num_prefilled
    parts = [_check_rows(burst, output, range(num_decoding, len(burst.states)), first=0, eos_ids=eos_ids)]
    if burst.num_steps:
        parts.insert(0, _check_rows(burst, output, range(num_decoding), first=1, eos_ids=eos_ids))
    return parts


def _check_rows(
    burst: InflightBurst, output: BurstOutput, rows: range, *, first: int, eos_ids: Collection[int]
) -> RowsOutput:
    """Lines from `first` on of the rows whose requests still run."""
    states = burst.states
    running = np.array([row for row in rows if states[row].request.slot is not None], dtype=np.int64)
    token_ids_LR, logprobs_LR = output.token_ids_LR[first:, running], output.logprobs_LR[first:, running]
    selected = burst.rows.select(running)
    is_eos_LR = np.isin(token_ids_LR, list(eos_ids))
    has_eos_R = is_eos_LR.any(axis=0)
    is_finite_R = np.isfinite(logprobs_LR).all(axis=0)
    has_room_R = selected.num_tokens_R < selected.max_num_tokens_R
    return RowsOutput(
        states=[states[row] for row in running.tolist()],
        slots_R=selected.slots_R,
        token_ids_LR=token_ids_LR,
        logprobs_LR=logprobs_LR,
        entropies_LR=None if output.entropies_LR is None else output.entropies_LR[first:, running],
        num_to_eos_R=np.where(has_eos_R, is_eos_LR.argmax(axis=0) + 1, np.iinfo(np.int64).max),
        is_continuing_R=has_room_R & ~has_eos_R & is_finite_R & ~selected.has_stops_R,
        is_streaming_R=selected.is_streaming_R,
    )
