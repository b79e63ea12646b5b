"""One step of the engine: the scheduler's choice through the model, and what came out to the desk.

`TokenStepper` computes a forward and waits for it: each request gets its next token. `BlockStepper` keeps a device
busy: it queues prefills and a block of decoding steps, and only then reads the block before, so that the host's work
hides behind the device's. A row whose end is found in a block that is followed by another decodes on for nothing until
that one ends, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tunesmith.engine.block import Block, BlockRows, Ticket
from tunesmith.engine.calls import Call, Desk, find_first_stop, find_limit
from tunesmith.engine.request import Request
from tunesmith.engine.runner import Runner
from tunesmith.engine.scheduler import Work


class TokenStepper:
    """A forward a step."""

    def __init__(self, runner: Runner, desk: Desk) -> None:
        self._runner = runner
        self._desk = desk

    @property
    def has_flight(self) -> bool:
        """Whether somebody waits for what the device was told to do."""
        return False

    def step(self) -> None:
        schedule = self._desk.scheduler.schedule()
        self._desk.note_schedule(schedule)
        if schedule.work:
            self._desk.counts["steps"] += 1
            self._run(schedule.work)

    def drain(self) -> None:
        """Read what is in flight."""

    def _run(self, work: Sequence[Work]) -> None:
        """Compute the work, and enter what it sampled."""
        sampling, draws = self._runner.run(work)
        self._desk.scheduler.commit(work)
        rows = zip(sampling, draws.token_ids, draws.logprobs, draws.is_finite, strict=True)
        for item, token_id, logprob, is_finite in rows:
            call = self._desk.calls[item.request.request_id]
            if is_finite:
                self._enter(call, [token_id], [logprob])
            else:
                self._fail(call)

    def _enter(self, call: Call, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Take the next tokens of a call up to the one that ends it."""
        num_kept, stop_reason = find_first_stop(call, token_ids, eos_ids=self._desk.eos_ids)
        self._desk.add_tokens(call, token_ids[:num_kept], logprobs[:num_kept])
        if stop_reason is not None:
            self._desk.end(call, stop_reason)

    def _fail(self, call: Call) -> None:
        """Wipe the pages of a request that must not be read by others, and end it."""
        self._runner.cache.clear(call.request.pages)
        self._desk.fail(call)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A block in the device's queue."""

    ticket: Ticket
    requests: list[Request]
    num_fresh: int
    num_steps: int


class BlockStepper(TokenStepper):
    """A block of tokens a step, one block ahead of what is read."""

    def __init__(self, runner: Runner, desk: Desk, *, block: int) -> None:
        super().__init__(runner, desk)
        self._block = block
        self._flight: _Flight | None = None
        self._eos_ids = np.array(sorted(desk.eos_ids), dtype=np.int64)

    @property
    def has_flight(self) -> bool:
        return self._flight is not None and any(self._desk.find(request) for request in self._flight.requests)

    def step(self) -> None:
        """Queue the next block, then read the last; where pages are short, read first and choose anew."""
        self._desk.counts["steps"] += 1
        flight, self._flight = self._flight, None
        ahead = self._launch(flight)
        if flight is not None:
            self._read(flight)
            ahead = self._launch(None) if ahead is None else ahead
        self._flight = ahead

    def drain(self) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            self._read(flight)

    def _launch(self, before: _Flight | None) -> _Flight | None:
        """Queue what can be computed now; None where there is nothing, or not without reading `before` first."""
        requests, sources = self._continue(before)
        scheduler = self._desk.scheduler
        if not scheduler.reserve(requests, self._block):
            return None
        for request in requests:
            request.num_launches += 1
        fresh, hidden = self._start_requests(requests, sources, may_preempt=before is None)
        requests += fresh
        if not requests:
            return None
        num_steps = min(self._block, max(request.limit - request.num_known for request in requests))
        if not scheduler.reserve(requests, num_steps):
            num_steps = 0 if fresh or before is not None else 1  # for one step they hold the pages already
        for request in requests:
            request.num_in_flight += num_steps
        rows = _describe(requests, sources, hidden, num_steps)
        ticket = self._runner.launch_block(requests, rows, num_steps=num_steps)
        return _Flight(ticket, requests, len(fresh), num_steps)

    def _continue(self, before: _Flight | None) -> tuple[list[Request], list[int]]:
        """Requests of the block before that go on whatever it draws, and their rows in it."""
        requests, sources = [], []
        for row, request in enumerate(() if before is None else before.requests):
            if request.num_known < request.limit and self._desk.find(request) is not None:
                requests.append(request)
                sources.append(row)
        return requests, sources

    def _start_requests(
        self, requests: list[Request], sources: list[int], *, may_preempt: bool
    ) -> tuple[list[Request], list[Tensor]]:
        """Prefill while requests wait and fit. Those whose last token is known join `requests`.

        Returns the fresh ones, whose next token is drawn from the hidden states that come with them.
        """
        fresh: list[Request] = []
        hidden: list[Tensor] = []
        while True:
            schedule = self._desk.scheduler.schedule(may_preempt=may_preempt)
            self._desk.note_schedule(schedule)
            may_preempt = False  # from now on some requests are launched
            in_blocks = [item for item in schedule.work if self._runner.can_decode_block(item.request)]
            if len(in_blocks) < len(schedule.work):
                self._run([item for item in schedule.work if not self._runner.can_decode_block(item.request)])
            prefills = []
            for item in in_blocks:
                if item.stop - item.start == 1 and item.samples:
                    item.request.num_launches += 1
                    requests.append(item.request)
                    sources.append(-1)
                else:
                    prefills.append(item)
            if not prefills:
                return fresh, hidden
            sampling, hidden_NC = self._runner.prefill(prefills)
            self._desk.scheduler.commit(prefills)
            for item in sampling:
                item.request.num_launches += 1
                item.request.num_in_flight += 1
                fresh.append(item.request)
            if sampling:
                hidden.append(hidden_NC)
            if len(sampling) < len(prefills):
                return fresh, hidden  # a prompt longer than one forward: the others decode a block in between

    def _read(self, flight: _Flight) -> None:
        """Wait for a block, and enter each row's tokens up to the one that ends it."""
        block = flight.ticket.read()
        found = _find_ends(block, self._eos_ids, num_fresh=flight.num_fresh)
        num_plain = len(flight.requests) - flight.num_fresh
        for row, request in enumerate(flight.requests):
            first = 1 if row < num_plain else 0
            request.num_launches -= 1
            request.num_in_flight -= flight.num_steps + 1 - first
            call = self._desk.find(request)
            if call is not None:
                self._enter_row(call, found, row, first)

    def _enter_row(self, call: Call, found: _Ends, row: int, first: int) -> None:
        token_ids, logprobs = found.token_ids_RL[row, first:].tolist(), found.logprobs_RL[row, first:].tolist()
        sampling = call.request.sampling
        if call.matcher is not None or sampling.stop_token_ids:
            num_kept, stop_reason = find_first_stop(call, token_ids, eos_ids=self._desk.eos_ids)
        else:
            num_kept = min(len(token_ids), call.request.limit - len(call.request.token_ids))
            num_eos = found.lines_of_eos[row] - first + 1
            if num_eos <= num_kept and not sampling.ignore_eos:
                num_kept, stop_reason = num_eos, "eos"
            else:
                stop_reason = find_limit(call.request, num_kept)
        if found.is_broken[row] and not np.isfinite(logprobs[:num_kept]).all():
            self._fail(call)
            return
        self._desk.add_tokens(call, token_ids[:num_kept], logprobs[:num_kept])
        call.request.num_computed = len(call.request.token_ids) - 1
        if stop_reason is not None:
            self._desk.end(call, stop_reason)


@dataclass(frozen=True, slots=True)
class _Ends:
    """A block as rows, and where its rows may end."""

    token_ids_RL: NDArray[np.int32]
    logprobs_RL: NDArray[np.float32]
    lines_of_eos: list[int]
    """The first line with an end-of-sequence token; far beyond the last where there is none."""
    is_broken: list[bool]
    """Some logprob is not finite."""


def _find_ends(block: Block, eos_ids: NDArray[np.int64], *, num_fresh: int) -> _Ends:
    token_ids_RL = np.ascontiguousarray(block.token_ids_LR.T)
    logprobs_RL = np.ascontiguousarray(block.logprobs_LR.T)
    num_plain = len(token_ids_RL) - num_fresh
    is_eos_RL = np.isin(token_ids_RL, eos_ids)
    is_eos_RL[:num_plain, 0] = False
    is_broken_RL = ~np.isfinite(logprobs_RL)
    is_broken_RL[:num_plain, 0] = False
    nowhere = np.iinfo(np.int32).max
    lines_R = np.where(np.any(is_eos_RL, axis=1), is_eos_RL.argmax(axis=1), nowhere)
    return _Ends(token_ids_RL, logprobs_RL, lines_R.tolist(), np.logical_or.reduce(is_broken_RL, axis=1).tolist())


def _describe(
    requests: Sequence[Request], sources: Sequence[int], hidden: Sequence[Tensor], num_steps: int
) -> BlockRows:
    """Requests, whose tokens in flight include the block's, as arrays; fresh ones are behind those with a source."""
    num_fresh = len(requests) - len(sources)
    positions = np.array([request.num_known - 1 - num_steps for request in requests], dtype=np.int64)
    positions[len(sources) :] -= 1  # of the last token that is computed: the next one is drawn from it
    return BlockRows(
        slots_R=np.array([request.row for request in requests], dtype=np.int64),
        sources_R=np.array([*sources, *[-1] * num_fresh], dtype=np.int64),
        token_ids_R=np.array([request.token_ids[-1] for request in requests], dtype=np.int64),
        positions_R=positions,
        fresh_hidden=hidden,
    )
