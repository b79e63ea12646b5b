"""Responses of web search services, as their documentation shows them, and a server that replays them over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

SERPER = {
    "searchParameters": {"q": "apple inc", "type": "search", "num": 3},
    "answerBox": {"title": "Apple Inc. / Founded", "answer": "April 1, 1976", "link": "https://example.org/founded"},
    "knowledgeGraph": {
        "title": "Apple",
        "type": "Technology company",
        "description": "Apple Inc. is an American multinational technology company.",
        "attributes": {"Headquarters": "Cupertino, CA"},
    },
    "organic": [
        {"title": "Apple", "link": "https://www.apple.com/", "snippet": "Discover the world of Apple.", "position": 1},
        {"title": "Apple Inc. - Wikipedia", "link": "https://en.wikipedia.org/wiki/Apple_Inc.", "position": 2},
        {"title": "", "link": "https://example.org/empty", "snippet": "", "position": 3},
    ],
}
BING = {
    "_type": "SearchResponse",
    "queryContext": {"originalQuery": "sailing dinghies"},
    "webPages": {
        "totalEstimatedMatches": 2,
        "value": [
            {"id": "1", "name": "Dinghy sailing", "url": "https://example.org/a", "snippet": "Small sailing boats."},
            {"id": "2", "name": "Classes", "url": "https://example.org/b", "snippet": "Types of dinghies."},
        ],
    },
}


class ReplayServer:
    """Answers each request with the next step of a script: a JSON value, a `Response`, or a function of the request."""

    def __init__(self, *steps: object) -> None:
        self.steps = list(steps)
        self.requests: list[tuple[str, dict[str, str], str, bytes]] = []
        """Method, headers, path with query string, and body of each request."""
        self.url = ""

    async def answer(self, request: Request) -> Response:
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        self.requests.append((request.method, dict(request.headers), path, await request.body()))
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        if inspect.iscoroutinefunction(step):
            step = await step(request)
        return step if isinstance(step, Response) else JSONResponse(step)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[ReplayServer]:
        """Listen on a free port of this machine, on the running event loop."""
        app = Starlette(routes=[Route("/{path:path}", self.answer, methods=["GET", "POST"])])
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(64)
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", access_log=False))
            server.capture_signals = contextlib.nullcontext
            task = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.005)
            try:
                yield self
            finally:
                server.should_exit = server.force_exit = True
                await task
