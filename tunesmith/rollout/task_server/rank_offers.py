"""One queue for the workers of several ranks.

Every rank serves the model for its own attempts and receives their reports, and workers know the first rank only. The
others offer it their attempts, with one open request each: the first line of the answer names the worker that has taken
the attempt, and the request stays open until the attempt ends. A task's `base_url` is that of its rank, and the first
rank passes reports on.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tunesmith.http_server import wait_disconnect
from tunesmith.rollout.failures import WorkerLostError
from tunesmith.rollout.task_server.queue import NUM_REMEMBERED, Attempt, QueueError, TaskQueue
from tunesmith.rollout.task_server.request import check_key, read_body, read_fields

OFFER_PATH = "/ranks/attempts"


class RankOffer(BaseModel):
    """The body of an offer."""

    model_config = ConfigDict(extra="forbid", strict=True)
    attempt_id: str
    task: dict[str, Any]
    model_name: str
    rank: int
    url: str
    """Base URL of the rank's server, as the first rank reaches it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteQueue:
    """The first rank's queue, from the side of another rank."""

    client: httpx.AsyncClient
    """Of the first rank's server, with the key of the ranks."""
    rank: int
    url: str
    """Base URL of this rank's server."""

    async def offer(self, attempt: Attempt) -> None:
        """Offer the attempt until cancelled; notes its worker. An error counts as a lost worker."""
        offer = RankOffer(
            attempt_id=attempt.attempt_id,
            task=dict(attempt.task),
            model_name=attempt.model_name,
            rank=self.rank,
            url=self.url,
        )
        try:
            async with self.client.stream("POST", OFFER_PATH, content=offer.model_dump_json()) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    attempt.worker = json.loads(line)["worker"]
                    attempt.taken.set()
            cause = "the server has ended"
        except httpx.HTTPError as error:
            cause = f"{type(error).__name__}: {error}"
        if not attempt.report.done():
            attempt.report.set_exception(WorkerLostError(f"the first rank no longer offers the task ({cause})"))
        attempt.taken.set()


@dataclass(slots=True, kw_only=True)
class RankRoutes:
    """Where the attempts of other ranks are served, on the first rank."""

    key: str
    """What ranks send in order to offer attempts."""
    client: httpx.AsyncClient
    _urls: OrderedDict[str, str] = field(default_factory=OrderedDict)
    """By attempt, ended ones too: their rank says why it refuses what comes late."""

    def add(self, attempt_id: str, url: str) -> None:
        self._urls[attempt_id] = url
        if len(self._urls) > NUM_REMEMBERED:
            self._urls.popitem(last=False)

    def find(self, attempt_id: str) -> str | None:
        """Base URL of the attempt's rank; None: it is no other's."""
        return self._urls.get(attempt_id)

    async def pass_on(self, request: Request, url: str, *, max_bytes: int) -> Response:
        """Send a report to the attempt's rank, and return its answer."""
        body = await read_body(request, max_bytes=max_bytes)
        names = ("authorization", "x-api-key", "content-type")
        headers = {name: request.headers[name] for name in names if name in request.headers}
        target = httpx.URL(url).copy_with(path=request.url.path, query=request.url.query.encode() or None)
        try:
            answer = await self.client.request(request.method, target, content=body, headers=headers)
        except httpx.HTTPError as error:
            raise QueueError(503, f"the rank of the attempt does not answer ({error}); try again later") from error
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))


class OfferRoute:
    """The first rank's route for the offers of others."""

    def __init__(self, queue: TaskQueue, routes: RankRoutes) -> None:
        self._queue = queue
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        check_key(scope, self._routes.key)
        offer = await read_fields(request, RankOffer, max_bytes=sys.maxsize)
        self._routes.add(offer.attempt_id, offer.url)
        attempt = Attempt(
            attempt_id=offer.attempt_id, task=offer.task, model_name=offer.model_name, rank=offer.rank, url=offer.url
        )
        gone = asyncio.ensure_future(wait_disconnect(receive))
        taken = asyncio.ensure_future(attempt.taken.wait())
        try:
            with self._queue.offered(attempt):
                await asyncio.wait({gone, taken}, return_when=asyncio.FIRST_COMPLETED)
                if not gone.done():
                    line = json.dumps({"worker": attempt.worker}) + "\n"
                    await send({"type": "http.response.start", "status": 200, "headers": []})
                    await send({"type": "http.response.body", "body": line.encode(), "more_body": True})
                    await gone
        finally:
            gone.cancel()
            taken.cancel()
