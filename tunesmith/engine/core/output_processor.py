"""Callers of `generate` while they wait: when their completions end, and how they learn of tokens and endings."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tunesmith.engine.core.request import Request
from tunesmith.engine.core.scheduler import Schedule, Scheduler
from tunesmith.engine.core.stop_strings import StopMatcher
from tunesmith.engine.core.token_buffer import Drawn
from tunesmith.errors import EngineError
from tunesmith.types import Completion, OnTokens, StopReason


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One `generate` that waits for its completion."""

    request: Request
    future: asyncio.Future[Completion]
    on_tokens: OnTokens | None
    matcher: StopMatcher | None
    """Looks for stop strings, if there are any."""
    has_stops: bool = field(init=False)
    """Its end hangs on more than its length and the end-of-sequence tokens."""
    is_queued: bool = True
    """It takes up one of the `max_waiting` places."""

    def __post_init__(self) -> None:
        self.has_stops = self.matcher is not None or bool(self.request.sampling.stop_token_ids)


@dataclass(slots=True, kw_only=True)
class News:
    """What one step tells the event loop."""

    tokens: list[tuple[Call, Sequence[int], Sequence[float]]] = field(default_factory=list)
    """Token ids and logprobs for calls that listen."""
    endings: list[tuple[Call, Completion | EngineError]] = field(default_factory=list)
    num_places: int = 0
    """Calls that left the queue."""

    def __bool__(self) -> bool:
        return bool(self.tokens or self.endings or self.num_places)


class Desk:
    """The calls in the engine: whatever happens to one is entered here, and told to the event loop later."""

    def __init__(self, scheduler: Scheduler, *, eos_ids: Collection[int]) -> None:
        self.scheduler = scheduler
        self.eos_ids = frozenset(eos_ids)
        self.policy_version = 0
        self.calls: dict[int, Call] = {}
        self._drawn = Drawn(scheduler.max_num_seqs)
        self.counts: Counter[str] = Counter()
        self.num_deadlines = 0
        """Calls that end at a time of their own."""
        self._news = News()

    def take_over(self, other: Desk) -> None:
        """Go on from where another desk stopped."""
        self.policy_version, self.counts, self._news = other.policy_version, other.counts, other.take_news()
        self.scheduler.restart(self.policy_version)

    def take_news(self) -> News:
        """What happened since this was last asked."""
        news, self._news = self._news, News()
        return news

    def open(self, call: Call) -> None:
        self.calls[call.request.request_id] = call
        self.num_deadlines += call.request.deadline_at is not None
        self.scheduler.add(call.request)

    def note_schedule(self, schedule: Schedule) -> None:
        """Count a step's work, end what can never fit, and give the places in the queue back."""
        self.counts["preemptions"] += schedule.num_preemptions
        for request in schedule.stuck:
            self._tell(self.calls[request.request_id], "context")
        for item in schedule.work:
            call = self.calls[item.request.request_id]
            if item.stop - item.start > 1 or item.start < len(item.request.prompt_ids):
                self.counts["prefill_tokens"] += item.stop - item.start
            if call.is_queued:
                call.is_queued = False
                self._news.num_places += 1
                self.counts["requests"] += 1
                self.counts["cached_tokens"] += item.request.num_cached_tokens or 0

    def add_tokens(self, call: Call, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Enter tokens that were sampled for a call."""
        call.request.extend(token_ids, logprobs, self.policy_version)
        self.counts["sampled_tokens"] += len(token_ids)
        if call.on_tokens is not None:
            self.tell_tokens(call, token_ids, logprobs)

    def tell_tokens(self, call: Call, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Let a call that listens hear of tokens."""
        self._news.tokens.append((call, token_ids, logprobs))

    def add_block(
        self, slots_R: NDArray[np.int64], token_ids_LR: NDArray[np.int32], logprobs_LR: NDArray[np.float32]
    ) -> None:
        """Enter tokens that were sampled for requests in these slots; the requests list them once they are settled."""
        self._drawn.add(slots_R, token_ids_LR, logprobs_LR)
        self.counts["sampled_tokens"] += token_ids_LR.size

    def settle(self, request: Request) -> None:
        """Let a request list what it has drawn in blocks; before this, its tokens are not all there."""
        if request.row is None:
            return
        token_ids, logprobs = self._drawn.take(request.row)
        if token_ids:
            request.extend(token_ids, logprobs, self.policy_version)
            request.num_computed = len(request.token_ids) - 1

    def end(self, call: Call, stop_reason: StopReason) -> None:
        """Let the request go and complete its call."""
        self.settle(call.request)
        self.scheduler.remove(call.request)
        self._tell(call, stop_reason)

    def fail(self, call: Call) -> None:
        """End a request whose logits were not finite; nobody else may find its pages."""
        request = call.request
        self.settle(request)
        self.scheduler.pool.forget(request.pages)
        request.num_computed = request.num_published = 0
        self.scheduler.remove(request)
        self._news.endings.append((call, EngineError(
            f"logits of request {request.request_id} are not finite after {len(request.token_ids)} tokens "
            f"({len(request.prompt_ids)} of prompt) at policy version {self.policy_version}; "
            "lower the learning rate, or look for broken weights"
        )))  # fmt: skip
        self._forget(call)

    def fail_all(self, message: str, error: Exception) -> None:
        """End every call with an error; the scheduler is of no more use."""
        for call in list(self.calls.values()):
            failure = EngineError(message)
            failure.__cause__ = error
            self._news.endings.append((call, failure))
            self._forget(call)

    def _tell(self, call: Call, stop_reason: StopReason) -> None:
        self._news.endings.append((call, call.request.complete(stop_reason)))
        self._forget(call)

    def _forget(self, call: Call) -> None:
        del self.calls[call.request.request_id]
        self.num_deadlines -= call.request.deadline_at is not None
        self._news.num_places += call.is_queued
        call.is_queued = False


def find_first_stop(call: Call, token_ids: Sequence[int], *, eos_ids: Collection[int]) -> tuple[int, StopReason | None]:
    """How many of the next tokens belong to the completion, which have not been entered yet, and why it ends there."""
    request, sampling = call.request, call.request.sampling
    num_kept = min(len(token_ids), request.limit - len(request.token_ids))
    ends = eos_ids if not sampling.ignore_eos else ()
    if call.has_stops or ends:
        for index, token_id in enumerate(token_ids[:num_kept]):
            if token_id in ends:
                return index + 1, "eos"
            if token_id in sampling.stop_token_ids or (call.matcher is not None and call.matcher.add(token_id)):
                return index + 1, "stop"
    return num_kept, find_limit(request, num_kept)


def find_limit(request: Request, num_next: int) -> StopReason | None:
    """Why so many more tokens are all that a request may have; None when there is room left."""
    if len(request.token_ids) + num_next < request.limit:
        return None
    return "length" if request.num_sampled + num_next == request.sampling.max_tokens else "context"


def hand_out(news: News) -> list[int]:
    """Tell listeners their tokens and callers their endings; return the requests whose listener failed."""
    failed = []
    for call, token_ids, logprobs in news.tokens:
        if call.on_tokens is None or call.future.done():
            continue
        try:
            call.on_tokens(token_ids, logprobs)
        except Exception as error:  # noqa: BLE001 - the caller's own code: the error goes back to it alone
            call.future.set_exception(error)
            failed.append(call.request.request_id)
    for call, ending in news.endings:
        if call.future.done():
            continue
        if isinstance(ending, EngineError):
            call.future.set_exception(ending)
        else:
            call.future.set_result(ending)
    return failed
