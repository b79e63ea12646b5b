"""Engine steps: one forward at a time, or on a device that decodes in bursts one burst ahead of the host.

A synchronous step schedules, runs one forward, waits for it, and processes its tokens. An asynchronous step queues
prefills and a decode burst, and only then reads the previous burst, so the host's work overlaps with the device's. A
row that turns out to have ended keeps decoding until the burst that follows is over; those tokens are discarded.
Requests that the host must sample token by token get as many tokens between two bursts, one forward each. What is known
of the rows of a burst is held in arrays, so that rows that continue cost the host almost nothing. A step that verifies
drafts (`core/drafts.py`) is a synchronous one of all requests, with no burst in the queue.

Axes: R rows of a burst, in this order: rows of the previous burst, rows whose last token is known, prefilled rows. L
lines of a burst.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tunesmith.engine.batch.decode_burst import BurstInput, BurstOutput
from tunesmith.engine.core.output_processor import OutputProcessor, RequestState
from tunesmith.engine.core.request import Request
from tunesmith.engine.core.scheduler import ScheduledChunk
from tunesmith.engine.worker.model_runner import ModelRunner
from tunesmith.types import TokenDetails, count_equal

if TYPE_CHECKING:
    from tunesmith.engine.cuda.cuda_graphs import CudaBurstHandle  # needs Triton, which only CUDA machines have


STEPS_BETWEEN_PREFILLS = 4
"""Steps of a burst while a prompt is computed in several forwards: each prompt that joins later makes all steps until
then smaller than they could be, so few are taken, and none would let running requests wait."""


class SyncStepper:
    """One forward per step."""

    def __init__(self, runner: ModelRunner, output_processor: OutputProcessor) -> None:
        self._runner = runner
        self._output_processor = output_processor

    @property
    def has_inflight(self) -> bool:
        """Whether the device's queue holds work of a request that still runs."""
        return False

    def step(self) -> None:
        self._step(self._propose_drafts())

    def drain(self) -> None:
        """Wait for work in flight and process its tokens."""

    def _step(self, drafts: Mapping[int, list[int]]) -> None:
        """One forward of all requests, with the drafts of some."""
        processor = self._output_processor
        scheduled = processor.scheduler.schedule()
        processor.record_schedule(scheduled)
        if not scheduled.chunks:
            return
        processor.counts["steps"] += 1
        chunks = []
        for chunk in scheduled.chunks:
            draft = drafts.get(chunk.request.request_id, ()) if chunk.has_last_token else ()
            if draft and processor.scheduler.make_room(chunk.request, chunk.stop + len(draft)):
                processor.counts["drafted_tokens"] += len(draft)
                chunk = replace(chunk, draft=draft)
            chunks.append(chunk)
        self._run(chunks)

    def _propose_drafts(self) -> Mapping[int, list[int]]:
        """Drafts by request id, while nothing but decoding is left to do."""
        drafter, scheduler = self._output_processor.drafter, self._output_processor.scheduler
        if drafter is None or scheduler.waiting:
            return {}
        return drafter.propose(scheduler.running, max_tokens=scheduler.max_batched_tokens - len(scheduler.running))

    def _run(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Compute the chunks and process the tokens sampled from them."""
        sampling, sampled = self._runner.run(chunks)
        self._output_processor.scheduler.commit(chunks)
        first = 0
        for chunk in sampling:
            request, num_known = chunk.request, len(chunk.request.token_ids)
            num_sampled = 1 + count_equal(chunk.draft, sampled.token_ids[first : first + len(chunk.draft)])
            rows = slice(first, first + num_sampled)
            state = self._output_processor.states[request.request_id]
            details = sampled.get_details(rows, request.sampling)
            self._process(state, sampled.token_ids[rows], sampled.logprobs[rows], details)
            if chunk.draft:
                self._output_processor.counts["accepted_tokens"] += max(len(request.token_ids) - num_known - 1, 0)
            first += 1 + len(chunk.draft)

    def _process(
        self,
        state: RequestState,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        details: TokenDetails | None,
        *,
        num_to_eos: int | None = None,
    ) -> None:
        """Append sampled tokens to a request up to the one that ends it; `num_to_eos` as in `find_end`."""
        request, processor = state.request, self._output_processor
        num_kept, stop_reason = state.stops.find_end(token_ids, num_to_eos=num_to_eos)
        # what a row of a burst decodes after its end is not part of the reply and may be anything
        if not all(map(math.isfinite, logprobs[:num_kept])):
            self._fail(state)
            return
        if request.token_matcher is not None:
            try:
                request.token_matcher.accept(token_ids[0])
            except ValueError as error:
                processor.fail(state, str(error))
                return
        details = None if details is None else details.first(num_kept)
        processor.add_tokens(state, token_ids[:num_kept], logprobs[:num_kept], details)
        request.num_computed = len(request.token_ids) - 1
        if stop_reason is not None:
            processor.finish(state, stop_reason)

    def _fail(self, state: RequestState) -> None:
        """Fail a request whose logits are not finite, and zero the blocks that it alone holds.

        The next holder of these blocks would read their values. Shared blocks stay, since other requests use them; if
        their values are not finite those requests fail too, and the last of them zeroes the blocks.
        """
        self._runner.cache.clear(self._output_processor.scheduler.pool.select_unshared(state.request.blocks))
        self._output_processor.fail(state)


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

    handle: CudaBurstHandle
    states: list[RequestState]
    rows: BurstRows
    """`num_tokens_R` includes the tokens of this burst."""
    num_prefilled: int
    """The last rows, whose first token is sampled from a prefill."""
    num_steps: int

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
    """Rows that were decoding before the burst, and prefilled rows; these sampled one token more."""
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


class AsyncStepper(SyncStepper):
    """One burst per step, launched before the previous one is read."""

    def __init__(self, runner: ModelRunner, output_processor: OutputProcessor, *, burst_length: int) -> None:
        super().__init__(runner, output_processor)
        self._burst_length = burst_length
        self._inflight: InflightBurst | None = None

    @property
    def has_inflight(self) -> bool:
        return self._inflight is not None and any(each.request.slot is not None for each in self._inflight.states)

    def step(self) -> None:
        """Launch the next burst, then read the last one; when blocks are short, read first and schedule again."""
        drafter, scheduler = self._output_processor.drafter, self._output_processor.scheduler
        if drafter is not None and not scheduler.waiting and drafter.is_due(scheduler.running):
            self.drain()  # drafts continue the last token
            if drafts := self._propose_drafts():
                self._step(drafts)
                return
        self._output_processor.counts["steps"] += 1
        previous, self._inflight = self._inflight, None
        # The device still computes `previous`: what is scheduled here must be right whatever its tokens turn out to be.
        launched = self._launch(previous)
        if previous is not None:
            self._read(previous, is_last=launched is None)
            launched = self._launch(None) if launched is None else launched
        self._inflight = launched

    def drain(self) -> None:
        previous, self._inflight = self._inflight, None
        if previous is not None:
            self._read(previous, is_last=True)

    def _launch(self, previous: InflightBurst | None) -> InflightBurst | None:
        """Queue what can be computed now; None if that is nothing, or if `previous` must be read first."""
        sources = [] if previous is None else previous.find_continuing_rows()
        states = [] if previous is None else [previous.states[row] for row in sources]
        rows = collect_rows([], num_prefilled=0) if previous is None else previous.rows.select(sources)
        if not self._reserve(states, rows, self._burst_length):
            return None
        known, prefilled, hidden, is_prefilled = self._start_requests(may_preempt=previous is None)
        new = known + prefilled
        states += new
        if not states:
            return None
        new_rows = collect_rows(new, num_prefilled=len(prefilled))
        rows = rows.append(new_rows) if new else rows
        most = self._burst_length if is_prefilled else min(self._burst_length, STEPS_BETWEEN_PREFILLS)
        # more steps than the longest remaining reply would only compute tokens that are discarded
        num_steps = min(most, int((rows.max_num_tokens_R - rows.num_tokens_R).max()))
        if not self._reserve(new, new_rows, num_steps):
            num_steps = 0 if prefilled or previous is not None else 1  # one step fits into the blocks they hold
        burst_input = _build_input(sources, new, rows, hidden)
        requests = [state.request for state in states]
        handle = self._runner.launch_burst(requests, burst_input, num_new=len(new), num_steps=num_steps)
        # after the launch: the device works on the burst while the host samples for these
        self._step_others(num_steps - 1)
        return InflightBurst(
            handle=handle,
            states=states,
            rows=rows.advance(num_steps),
            num_prefilled=len(prefilled),
            num_steps=num_steps,
        )

    def _step_others(self, num_steps: int) -> None:
        """Decode requests that the host samples as many tokens as a burst does, one forward per token.

        `_start_requests` has computed the first one.
        """
        for _ in range(num_steps):
            chunks = self._output_processor.scheduler.continue_running(self._decodes_alone)
            if not chunks:
                return
            self._run(chunks)

    def _decodes_alone(self, request: Request) -> bool:
        """The host samples the request, and only its last token is not computed yet."""
        has_one_left = len(request.token_ids) - request.num_computed == 1
        return has_one_left and not self._runner.can_decode_in_burst(request)

    def _reserve(self, states: Sequence[RequestState], rows: BurstRows, num_steps: int) -> bool:
        """Hold blocks for `num_steps` more tokens of each request, up to its length limit.

        The last known token counts as one of them, since it is not computed yet.
        """
        num_tokens_R = np.minimum(rows.num_tokens_R - 1 + num_steps, rows.max_num_tokens_R)
        return self._output_processor.scheduler.reserve([state.request for state in states], num_tokens_R)

    def _start_requests(
        self, *, may_preempt: bool
    ) -> tuple[list[RequestState], list[RequestState], list[Tensor], bool]:
        """Prefill while requests wait and fit: those whose last token is known by now, and prefilled ones.

        The next token of prefilled requests is sampled from the hidden states returned with them. False is returned
        last if a prompt is not finished.
        """
        known: list[RequestState] = []
        prefilled: list[RequestState] = []
        hidden: list[Tensor] = []
        while True:
            scheduled = self._output_processor.scheduler.schedule(
                may_preempt=may_preempt, get_forward=self._get_forward
            )
            self._output_processor.record_schedule(scheduled)
            may_preempt = False  # from here on some requests are in flight
            forwards: tuple[list[ScheduledChunk], ...] = ([], [], [])
            for chunk in scheduled.chunks:
                forwards[self._get_forward(chunk)].append(chunk)
            prefills, others, last_tokens = forwards
            known += map(self._mark_inflight, last_tokens)
            sampling: list[ScheduledChunk] = []
            if prefills:
                sampling, hidden_NC = self._runner.prefill(prefills)
                self._output_processor.scheduler.commit(prefills)
                hidden += [hidden_NC] if sampling else []
            prefilled += map(self._mark_inflight, sampling)
            if others:
                self._run(others)
            if len(sampling) < len(prefills) or not prefills:  # others decode a short burst between chunks of a prompt
                return known, prefilled, hidden, not prefills

    def _get_forward(self, chunk: ScheduledChunk) -> int:
        """0 if the device computes the chunk before all else in the step, 1 if its request is one that the host
        samples, 2 if the burst computes it: a last known token."""
        if not self._runner.can_decode_in_burst(chunk.request):
            return 1
        # a burst continues from the state in the request's slot
        is_last_token = chunk.stop - chunk.start == 1 and chunk.has_last_token and chunk.has_own_state
        return 2 if is_last_token else 0

    def _mark_inflight(self, chunk: ScheduledChunk) -> RequestState:
        chunk.request.is_inflight = True
        return self._output_processor.states[chunk.request.request_id]

    def _read(self, burst: InflightBurst, *, is_last: bool) -> None:
        """Wait for a burst and process each row's tokens up to the one that ends it."""
        processor = self._output_processor
        for part in split_output(burst, burst.handle.read(), eos_ids=processor.eos_ids):
            continuing = np.flatnonzero(part.is_continuing_R)
            entropies_LR = part.entropies_LR
            processor.add_burst(
                part.slots_R[continuing],
                part.token_ids_LR[:, continuing],
                part.logprobs_LR[:, continuing],
                None if entropies_LR is None else entropies_LR[:, continuing],
            )
            others = np.flatnonzero(~part.is_continuing_R | part.is_streaming_R)
            token_ids, logprobs = part.token_ids_LR.T[others].tolist(), part.logprobs_LR.T[others].tolist()
            is_continuing, num_to_eos = part.is_continuing_R[others].tolist(), part.num_to_eos_R[others].tolist()
            for index, row in enumerate(others.tolist()):
                state, details = part.states[row], None
                if entropies_LR is not None and state.request.sampling.return_entropy:
                    details = TokenDetails(entropies=tuple(entropies_LR[:, row].tolist()))
                if is_continuing[index]:
                    processor.stream_tokens(state, token_ids[index], logprobs[index], details)
                else:
                    processor.flush(state.request)
                    self._process(state, token_ids[index], logprobs[index], details, num_to_eos=num_to_eos[index])
        if is_last:
            for state in burst.states:
                processor.flush(state.request)
                state.request.is_inflight = False


def _build_input(
    sources: list[int], new: Sequence[RequestState], rows: BurstRows, hidden: Sequence[Tensor]
) -> BurstInput:
    """The burst's rows before its launch: `num_tokens_R` includes tokens of the previous burst, not of this one."""
    num_prefilled = sum(map(len, hidden))
    positions_R = rows.num_tokens_R - 1
    positions_R[len(positions_R) - num_prefilled :] -= 1  # the last computed token: the next is sampled from it
    return BurstInput(
        slots_R=rows.slots_R,
        sources_R=np.array(sources + [-1] * len(new), dtype=np.int64),
        token_ids_R=np.array([0] * len(sources) + [state.request.token_ids[-1] for state in new], dtype=np.int64),
        positions_R=positions_R,
        prefill_hidden=hidden,
    )
