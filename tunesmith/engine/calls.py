"""One caller of `generate` while it waits: when its completion ends, and how it learns of tokens and endings."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tunesmith.engine.request import Request
from tunesmith.engine.stops import StopMatcher
from tunesmith.errors import EngineError
from tunesmith.types import Completion, OnToken, StopReason


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One `generate` that waits for its completion."""

    request: Request
    future: asyncio.Future[Completion]
    on_token: OnToken | None
    matcher: StopMatcher | None
    """Looks for stop strings, if there are any."""
    is_queued: bool = True
    """It takes up one of the `max_waiting` places."""


@dataclass(slots=True, kw_only=True)
class News:
    """What one step tells the event loop."""

    tokens: list[tuple[Call, int, float]] = field(default_factory=list)
    """Token id and logprob for calls that listen."""
    endings: list[tuple[Call, Completion | EngineError]] = field(default_factory=list)
    num_places: int = 0
    """Calls that left the queue."""


def find_stop(call: Call, token_id: int, *, eos_ids: Collection[int], max_model_len: int) -> StopReason | None:
    """Why the completion ends with this token, its latest; None when it goes on."""
    request, sampling = call.request, call.request.sampling
    if token_id in eos_ids and not sampling.ignore_eos:
        return "eos"
    if token_id in sampling.stop_token_ids or (call.matcher is not None and call.matcher.add(token_id)):
        return "stop"
    if request.num_sampled >= sampling.max_tokens:
        return "length"
    if len(request.token_ids) >= max_model_len:
        return "context"
    return None


def find_first_stop(
    call: Call, token_ids: Sequence[int], *, eos_ids: Collection[int], max_model_len: int
) -> tuple[int, StopReason | None]:
    """How many of the next tokens belong to the completion, which have not been appended yet, and why it ends there."""
    request, sampling = call.request, call.request.sampling
    num_for_length = sampling.max_tokens - request.num_sampled
    num_for_context = max_model_len - len(request.token_ids)
    num_kept = min(len(token_ids), num_for_length, num_for_context)
    ends = eos_ids if not sampling.ignore_eos else ()
    if call.matcher is not None or sampling.stop_token_ids or ends:
        for index, token_id in enumerate(token_ids[:num_kept]):
            if token_id in ends:
                return index + 1, "eos"
            if token_id in sampling.stop_token_ids or (call.matcher is not None and call.matcher.add(token_id)):
                return index + 1, "stop"
    if num_kept == num_for_length:
        return num_kept, "length"
    return num_kept, "context" if num_kept == num_for_context else None


def hand_out(news: News) -> list[int]:
    """Tell listeners their tokens and callers their endings; return the requests whose listener failed."""
    failed = []
    for call, token_id, logprob in news.tokens:
        if call.on_token is None or call.future.done():
            continue
        try:
            call.on_token(token_id, logprob)
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
