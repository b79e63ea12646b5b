"""Asynchronous engine steps on a device that decodes in bursts: one burst is queued while the host reads the last.

A step queues prefills and a decode burst, and only then reads the previous burst, so the host's work overlaps with the
device's. A row that turns out to have ended keeps decoding until the burst that follows is over; those tokens are
discarded. Requests that the host must sample token by token get as many tokens between two bursts, one forward each.

Axes: R rows of a burst, in this order: rows of the previous burst, rows whose last token is known, prefilled rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tunesmith.engine.batch.decode_burst import BurstInput
from tunesmith.engine.core.output_processor import OutputProcessor, RequestState
from tunesmith.engine.core.request import Request
from tunesmith.engine.core.scheduler import ScheduledChunk
from tunesmith.engine.worker.inflight import BurstRows, InflightBurst, collect_rows, split_output
from tunesmith.engine.worker.model_runner import ModelRunner
from tunesmith.engine.worker.sync_step import SyncStepper
from tunesmith.types import TokenDetails


class AsyncStepper(SyncStepper):
    """One burst per step, launched before the previous one is read."""

    def __init__(self, runner: ModelRunner, output_processor: OutputProcessor, *, burst_length: int) -> None:
        super().__init__(runner, output_processor)
        self._burst_length = burst_length
        self._inflight: InflightBurst | None = None

    @property
    def has_inflight(self) -> bool:
        return self._inflight is not None and self._inflight.has_running_requests

    def step(self) -> None:
        """Launch the next burst, then read the last one; when blocks are short, read first and schedule again."""
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
        known, prefilled, hidden = self._start_requests(may_preempt=previous is None)
        new = known + prefilled
        states += new
        if not states:
            return None
        new_rows = collect_rows(new, num_prefilled=len(prefilled))
        rows = rows.append(new_rows) if new else rows
        # more steps than the longest remaining reply would only compute tokens that are discarded
        num_steps = min(self._burst_length, int((rows.max_num_tokens_R - rows.num_tokens_R).max()))
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

    def _start_requests(self, *, may_preempt: bool) -> tuple[list[RequestState], list[RequestState], list[Tensor]]:
        """Prefill while requests wait and fit: those whose last token is known by now, and prefilled ones.

        The next token of prefilled requests is sampled from the hidden states returned with them.
        """
        known: list[RequestState] = []
        prefilled: list[RequestState] = []
        hidden: list[Tensor] = []
        while True:
            scheduled = self._output_processor.scheduler.schedule(
                may_preempt=may_preempt, is_in_first_forward=self._is_prefill
            )
            self._output_processor.record_schedule(scheduled)
            may_preempt = False  # from here on some requests are in flight
            prefills, others = [], []
            for chunk in scheduled.chunks:
                if self._is_prefill(chunk):
                    prefills.append(chunk)
                elif self._runner.can_decode_in_burst(chunk.request):
                    known.append(self._mark_inflight(chunk))
                else:
                    others.append(chunk)
            sampling: list[ScheduledChunk] = []
            if prefills:
                sampling, hidden_NC = self._runner.prefill(prefills)
                self._output_processor.scheduler.commit(prefills)
                hidden += [hidden_NC] if sampling else []
            prefilled += map(self._mark_inflight, sampling)
            if others:
                self._run(others)
            if len(sampling) < len(prefills) or not prefills:
                return known, prefilled, hidden  # a prompt exceeds one forward: others decode a burst between chunks

    def _is_prefill(self, chunk: ScheduledChunk) -> bool:
        """The device computes the chunk before all else in the step; a last known token is computed by the burst."""
        is_last_token = chunk.stop - chunk.start == 1 and chunk.has_last_token
        return not is_last_token and self._runner.can_decode_in_burst(chunk.request)

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
                state = part.states[row]
                entropies = _read_entropies(state, entropies_LR, row)
                if is_continuing[index]:
                    details = None if entropies is None else TokenDetails(entropies=entropies)
                    processor.stream_tokens(state, token_ids[index], logprobs[index], details)
                else:
                    self._process_row(state, token_ids[index], logprobs[index], entropies, num_to_eos=num_to_eos[index])
        if is_last:
            for state in burst.states:
                processor.flush(state.request)
                state.request.is_inflight = False

    def _process_row(
        self,
        state: RequestState,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        entropies: tuple[float, ...] | None,
        *,
        num_to_eos: int,
    ) -> None:
        """Append a row's tokens, of which the `num_to_eos`-th is the first end-of-sequence token."""
        request, processor = state.request, self._output_processor
        processor.flush(request)
        num_kept, stop_reason = state.stops.find_end(token_ids, num_to_eos=num_to_eos)
        # what a row decodes after its end is not part of the reply and may be anything
        if not all(map(math.isfinite, logprobs[:num_kept])):
            self._fail(state)
            return
        details = None if entropies is None else TokenDetails(entropies=entropies[:num_kept])
        processor.add_tokens(state, token_ids[:num_kept], logprobs[:num_kept], details)
        request.num_computed = len(request.token_ids) - 1
        if stop_reason is not None:
            processor.finish(state, stop_reason)


def _read_entropies(
    state: RequestState, entropies_LR: NDArray[np.float32] | None, row: int
) -> tuple[float, ...] | None:
    """The entropies of a row's tokens, if its request asks for them."""
    if entropies_LR is None or not state.request.sampling.return_entropy:
        return None
    return tuple(entropies_LR[:, row].tolist())


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
