"""Results of engine steps for the callers of `generate`: tokens, completions and errors.

The stepper enters sampled tokens; what callers receive is collected in a `StepOutput`, and the engine passes it to
the event loop after the step (`deliver_output`). Holds no tensors.

Axes: S slots, W columns, L lines of a burst, R rows.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.engine.core.drafts import Drafter
from tunesmith.engine.core.request import Request
from tunesmith.engine.core.scheduler import Scheduler, SchedulerOutput
from tunesmith.engine.core.stopping import StopConditions
from tunesmith.errors import EngineError
from tunesmith.types import Completion, OnTokens, StopReason, TokenDetails


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """A request together with the caller that awaits its completion."""

    request: Request
    future: asyncio.Future[Completion]
    on_tokens: OnTokens | None
    """Callback that receives tokens as they are sampled."""
    stops: StopConditions
    is_queued: bool = True
    """It has not started."""
    has_place: bool = True
    """Counts towards `max_waiting`."""


@dataclass(slots=True, kw_only=True)
class StepOutput:
    """Tokens and results that the event loop delivers to callers after a step."""

    tokens: list[tuple[RequestState, Sequence[int], Sequence[float], TokenDetails | None]] = field(default_factory=list)
    """Token ids, logprobs and details for requests with an `on_tokens` callback."""
    results: list[tuple[RequestState, Completion | EngineError]] = field(default_factory=list)
    num_dequeued: int = 0
    """Places that requests left in the waiting queue."""

    def __bool__(self) -> bool:
        return bool(self.tokens or self.results or self.num_dequeued)


class OutputProcessor:
    """The requests in the engine and their output that has not been delivered yet."""

    def __init__(self, scheduler: Scheduler, *, eos_ids: Collection[int], drafter: Drafter | None) -> None:
        """`drafter` None: no speculation."""
        self.scheduler = scheduler
        self.drafter = drafter
        self.read_routes: Callable[[Request], Any] = lambda _: None
        """Reads `Completion.routes` from the cache."""
        self.eos_ids = frozenset(eos_ids)
        self.states: dict[int, RequestState] = {}
        """The state of each request by its id."""
        self._token_buffer = TokenBuffer(scheduler.max_num_seqs)
        self.counts: Counter[str] = Counter()
        self._output = StepOutput()

    def continue_from(self, other: OutputProcessor) -> None:
        """Take over version, counters and undelivered output of a processor whose step failed."""
        self.counts, self._output = other.counts, other.take_output()
        self.scheduler.reset_cache(other.scheduler.policy_version)

    def take_output(self) -> StepOutput:
        """Output since the last call."""
        output, self._output = self._output, StepOutput()
        return output

    def add_request(self, state: RequestState) -> None:
        self.states[state.request.request_id] = state
        self.scheduler.add(state.request)

    def hold(self) -> None:
        """Set all requests aside; their places in the waiting queue are free for others."""
        self.scheduler.hold()
        for state in self.states.values():
            self._free_place(state)

    def record_schedule(self, scheduled: SchedulerOutput) -> None:
        """Count a step's tokens, and free places in the waiting queue."""
        self.counts["preemptions"] += scheduled.num_preemptions
        for chunk in scheduled.chunks:
            state = self.states[chunk.request.request_id]
            if chunk.stop - chunk.start > 1 or chunk.start < len(chunk.request.prompt_ids):
                self.counts["prefill_tokens"] += chunk.stop - chunk.start
            if state.is_queued:
                state.is_queued = False
                self._free_place(state)
                self.counts["requests"] += 1
                self.counts["cached_tokens"] += chunk.request.num_cached_tokens or 0

    def add_tokens(
        self,
        state: RequestState,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        details: TokenDetails | None = None,
    ) -> None:
        """Append sampled tokens to a request."""
        state.request.extend(token_ids, logprobs, state.request.cache_version, details)
        self.counts["sampled_tokens"] += len(token_ids)
        if state.on_tokens is not None:
            self.stream_tokens(state, token_ids, logprobs, details)

    def stream_tokens(
        self, state: RequestState, token_ids: Sequence[int], logprobs: Sequence[float], details: TokenDetails | None
    ) -> None:
        """Queue tokens for the request's `on_tokens` callback."""
        self._output.tokens.append((state, token_ids, logprobs, details))

    def add_burst(
        self,
        slots_R: NDArray[np.int64],
        token_ids_LR: NDArray[np.int32],
        logprobs_LR: NDArray[np.float32],
        entropies_LR: NDArray[np.float32] | None,
    ) -> None:
        """Buffer sampled tokens of the requests in these slots; `flush` copies them to a request."""
        self._token_buffer.append(slots_R, token_ids_LR, logprobs_LR, entropies_LR)
        self.counts["sampled_tokens"] += token_ids_LR.size

    def flush(self, request: Request) -> None:
        """Append a request's buffered tokens to it; until then its `token_ids` are incomplete."""
        if request.slot is None:
            return
        details = None
        if request.sampling.return_entropy:
            details = TokenDetails(entropies=self._token_buffer.read_entropies(request.slot))
        token_ids, logprobs = self._token_buffer.take(request.slot)
        if token_ids:
            request.extend(token_ids, logprobs, request.cache_version, details)
            request.num_computed = len(request.token_ids) - 1

    def copy_tokens(self, request: Request) -> Completion:
        """The tokens of a request so far, those in the buffer included."""
        copied = request.complete("cancelled")
        if request.slot is None or request.request_id not in self.states:
            return copied
        token_ids, logprobs = self._token_buffer.read(request.slot)
        entropies = copied.entropies
        if entropies is not None:
            entropies += self._token_buffer.read_entropies(request.slot)
        return replace(
            copied,
            sampled_ids=(*copied.sampled_ids, *token_ids),
            logprobs=(*copied.logprobs, *logprobs),
            policy_versions=(*copied.policy_versions, *[request.cache_version] * len(token_ids)),
            entropies=entropies,
            top_logprobs=None,
        )

    def finish(self, state: RequestState, stop_reason: StopReason) -> None:
        """Remove a request from the scheduler and complete it."""
        self.flush(state.request)
        # of a request that is cancelled, tokens may be in the device's queue
        routes = None if stop_reason == "cancelled" else self.read_routes(state.request)
        self.scheduler.remove(state.request)
        self._output.results.append((state, replace(state.request.complete(stop_reason), routes=routes)))
        self._remove(state)

    def fail(self, state: RequestState, message: str | None = None) -> None:
        """Fail a request, by default because its logits are not finite, and drop its blocks from the prefix cache."""
        request = state.request
        self.flush(request)
        self.scheduler.pool.unpublish(request.blocks)
        request.num_computed = request.num_published = 0
        self.scheduler.remove(request)
        self._output.results.append((state, EngineError(message or (
            f"logits of request {request.request_id} are not finite after {len(request.token_ids)} tokens "
            f"({len(request.prompt_ids)} of prompt) at policy version {self.scheduler.policy_version}; "
            "lower the learning rate, or look for broken weights"
        ))))  # fmt: skip
        self._remove(state)

    def fail_all(self, message: str, error: Exception) -> None:
        """Fail every request; the scheduler's state is not usable afterwards."""
        for state in list(self.states.values()):
            failure = EngineError(message)
            failure.__cause__ = error
            self._output.results.append((state, failure))
            self._remove(state)

    def _remove(self, state: RequestState) -> None:
        del self.states[state.request.request_id]
        if self.drafter is not None:
            self.drafter.end(state.request)
        self._free_place(state)

    def _free_place(self, state: RequestState) -> None:
        self._output.num_dequeued += state.has_place
        state.has_place = False


def deliver_output(output: StepOutput) -> list[int]:
    """Call `on_tokens` callbacks and resolve futures; return the ids of requests whose callback raised."""
    failed = []
    for state, token_ids, logprobs, details in output.tokens:
        if state.on_tokens is None or state.future.done():
            continue
        try:
            state.on_tokens(token_ids, logprobs, *(() if details is None else (details,)))
        except Exception as error:  # noqa: BLE001 - the caller's own code: the error goes back to that caller alone
            state.future.set_exception(error)
            failed.append(state.request.request_id)
    for state, result in output.results:
        if state.future.done():
            continue
        if isinstance(result, EngineError):
            state.future.set_exception(result)
        else:
            state.future.set_result(result)
    return failed


INITIAL_WIDTH = 256
"""Columns at first; the arrays at least double when a slot needs more."""


class TokenBuffer:
    """Tokens of decode bursts, with logprobs and entropies, in arrays with one line per slot.

    Most rows of a burst do not end in it. Their tokens stay here, appended for all rows at once, until the request ends
    or its tokens are needed: appending them to each request's lists would take the host longer than the next burst
    takes the device.
    """

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
        """The entropies of a slot's tokens, until `take` removes them; empty if no burst had any."""
        return () if self._entropies_SW is None else tuple(self._entropies_SW[slot, : self._counts_S[slot]].tolist())

    def read(self, slot: int) -> tuple[list[int], list[float]]:
        count = self._counts_S[slot]
        return self._token_ids_SW[slot, :count].tolist(), self._logprobs_SW[slot, :count].tolist()

    def take(self, slot: int) -> tuple[list[int], list[float]]:
        """Remove and return a slot's token ids and logprobs."""
        taken = self.read(slot)
        self._counts_S[slot] = 0
        return taken

    def _widen(self, num_columns: int) -> None:
        width = self._token_ids_SW.shape[1]
        if num_columns > width:
            padding = ((0, 0), (0, max(num_columns - width, width)))
            self._token_ids_SW = np.pad(self._token_ids_SW, padding)
            self._logprobs_SW = np.pad(self._logprobs_SW, padding)
            if self._entropies_SW is not None:
                self._entropies_SW = np.pad(self._entropies_SW, padding)
