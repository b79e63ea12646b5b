"""Steps of the engine on a device that decodes blocks of tokens, one block ahead of what is read.

A step queues prefills and a block of decoding steps, and only then reads the block before, so that the host's work
hides behind the device's. A row whose end is found in a block that is followed by another decodes on for nothing until
that one ends, too.

Axes: R rows of a block, in this order: those of the block before, others whose last token is known, fresh ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tunesmith.engine.batch.decode_burst import BlockRows
from tunesmith.engine.core.output_processor import Call, Desk, find_first_stop, find_limit
from tunesmith.engine.core.scheduler import Work
from tunesmith.engine.worker.inflight import KNOWN, LIMIT, SLOT, Flight, collect_numbers, split_rows
from tunesmith.engine.worker.model_runner import Runner
from tunesmith.engine.worker.sync_step import TokenStepper
from tunesmith.types import StopReason


class BlockStepper(TokenStepper):
    """A block of tokens a step, one block ahead of what is read."""

    def __init__(self, runner: Runner, desk: Desk, *, block: int) -> None:
        super().__init__(runner, desk)
        self._block = block
        self._flight: Flight | None = None

    @property
    def has_flight(self) -> bool:
        return self._flight is not None and self._flight.is_wanted

    def step(self) -> None:
        """Queue the next block, then read the last; where pages are short, read first and choose anew."""
        self._desk.counts["steps"] += 1
        flight, self._flight = self._flight, None
        ahead = self._launch(flight)
        if flight is not None:
            self._read(flight, is_last=ahead is None)
            ahead = self._launch(None) if ahead is None else ahead
        self._flight = ahead

    def drain(self) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            self._read(flight, is_last=True)

    def _launch(self, before: Flight | None) -> Flight | None:
        """Queue what can be computed now; None where there is nothing, or not without reading `before` first."""
        sources = [] if before is None else before.find_rows_that_go_on()
        calls = [] if before is None else [before.calls[row] for row in sources]
        numbers_5R = collect_numbers([], num_fresh=0) if before is None else before.numbers_5R[:, sources]
        if not self._reserve(calls, numbers_5R, self._block):
            return None
        known, fresh, hidden = self._start_calls(may_preempt=before is None)
        new = known + fresh
        calls += new
        if not calls:
            return None
        numbers_of_new = collect_numbers(new, num_fresh=len(fresh))
        numbers_5R = np.concatenate([numbers_5R, numbers_of_new], axis=1)
        num_steps = min(self._block, int((numbers_5R[LIMIT] - numbers_5R[KNOWN]).max()))
        if not self._reserve(new, numbers_of_new, num_steps):
            num_steps = 0 if fresh or before is not None else 1  # for one step they hold the pages already
        rows = _describe(sources, new, numbers_5R, hidden)
        requests = [call.request for call in calls]
        ticket = self._runner.launch_block(requests, rows, num_new=len(new), num_steps=num_steps)
        numbers_5R[KNOWN] += num_steps
        return Flight(ticket=ticket, calls=calls, numbers_5R=numbers_5R, num_fresh=len(fresh), num_steps=num_steps)

    def _reserve(self, calls: Sequence[Call], numbers_5R: NDArray[np.int64], num_steps: int) -> bool:
        """Hold pages for so many steps of each call, though for none past where it must end.

        The last known token counts as one of them, for it is not computed yet.
        """
        num_tokens_R = np.minimum(numbers_5R[KNOWN] - 1 + num_steps, numbers_5R[LIMIT])
        return self._desk.scheduler.reserve([call.request for call in calls], num_tokens_R)

    def _start_calls(self, *, may_preempt: bool) -> tuple[list[Call], list[Call], list[Tensor]]:
        """Prefill while requests wait and fit: calls whose last token is known by now, and fresh ones.

        The next token of the fresh ones is drawn from the hidden states that come with them.
        """
        known: list[Call] = []
        fresh: list[Call] = []
        hidden: list[Tensor] = []
        while True:
            schedule = self._desk.scheduler.schedule(may_preempt=may_preempt, comes_first=self._is_prefill)
            self._desk.note_schedule(schedule)
            may_preempt = False  # from now on some requests are launched
            prefills, others = [], []
            for item in schedule.work:
                if self._is_prefill(item):
                    prefills.append(item)
                elif self._runner.can_decode_block(item.request):
                    known.append(self._enlist(item))
                else:
                    others.append(item)
            sampling: list[Work] = []
            if prefills:
                sampling, hidden_NC = self._runner.prefill(prefills)
                self._desk.scheduler.commit(prefills)
                hidden += [hidden_NC] if sampling else []
            fresh += map(self._enlist, sampling)
            if others:
                self._run(others)
            if len(sampling) < len(prefills) or not prefills:
                return known, fresh, hidden  # a prompt longer than a forward: the others decode a block in between

    def _is_prefill(self, item: Work) -> bool:
        """The device computes it before anything else of the step; a block computes a last known token itself."""
        is_last_token = item.stop - item.start == 1 and item.samples
        return not is_last_token and self._runner.can_decode_block(item.request)

    def _enlist(self, item: Work) -> Call:
        item.request.is_launched = True
        return self._desk.calls[item.request.request_id]

    def _read(self, flight: Flight, *, is_last: bool) -> None:
        """Wait for a block, and enter each row's tokens up to the one that ends it."""
        block = flight.ticket.read()
        for part in split_rows(flight, block, eos_ids=self._desk.eos_ids):
            plain = np.flatnonzero(part.is_plain_R)
            self._desk.add_block(part.slots_R[plain], part.token_ids_LR[:, plain], part.logprobs_LR[:, plain])
            others = np.flatnonzero(~part.is_plain_R | part.is_heard_R)
            token_ids, logprobs = part.token_ids_LR.T[others].tolist(), part.logprobs_LR.T[others].tolist()
            is_plain, num_to_eos = part.is_plain_R[others].tolist(), part.num_to_eos_R[others].tolist()
            for index, row in enumerate(others.tolist()):
                call = part.calls[row]
                if is_plain[index]:
                    self._desk.tell_tokens(call, token_ids[index], logprobs[index])
                else:
                    self._enter_row(call, token_ids[index], logprobs[index], num_to_eos=num_to_eos[index])
        if is_last:
            for call in flight.calls:
                self._desk.settle(call.request)
                call.request.is_launched = False

    def _enter_row(self, call: Call, token_ids: Sequence[int], logprobs: Sequence[float], *, num_to_eos: int) -> None:
        """Take the next tokens of a call, of which the `num_to_eos`-th is the first end-of-sequence one."""
        request = call.request
        self._desk.settle(request)
        stop_reason: StopReason | None
        if call.has_stops:
            num_kept, stop_reason = find_first_stop(call, token_ids, eos_ids=self._desk.eos_ids)
        else:
            num_kept = min(len(token_ids), request.limit - len(request.token_ids))
            if num_to_eos <= num_kept and not request.sampling.ignore_eos:
                num_kept, stop_reason = num_to_eos, "eos"
            else:
                stop_reason = find_limit(request, num_kept)
        if not all(map(math.isfinite, logprobs[:num_kept])):
            self._fail(call)
            return
        self._desk.add_tokens(call, token_ids[:num_kept], logprobs[:num_kept])
        request.num_computed = len(request.token_ids) - 1
        if stop_reason is not None:
            self._desk.end(call, stop_reason)


def _describe(
    sources: list[int], new: Sequence[Call], numbers_5R: NDArray[np.int64], hidden: Sequence[Tensor]
) -> BlockRows:
    """The rows of a block as the device is told of them; nothing of theirs is drawn yet but by the block before."""
    num_fresh = sum(map(len, hidden))
    positions_R = numbers_5R[KNOWN] - 1
    positions_R[len(positions_R) - num_fresh :] -= 1  # of the last computed token: the next is drawn from it
    return BlockRows(
        slots_R=numbers_5R[SLOT],
        sources_R=np.array(sources + [-1] * len(new), dtype=np.int64),
        token_ids_R=np.array([0] * len(sources) + [call.request.token_ids[-1] for call in new], dtype=np.int64),
        positions_R=positions_R,
        fresh_hidden=hidden,
    )
