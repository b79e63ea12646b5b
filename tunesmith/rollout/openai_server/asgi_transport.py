"""An httpx transport that calls an ASGI app in the same event loop, without a socket.

Unlike `httpx.ASGITransport` it hands the response over when it starts and streams its body; closing the response, or
cancelling the caller, disconnects the client as the app sees it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
from starlette.types import ASGIApp, Message


class InProcessTransport(httpx.AsyncBaseTransport):
    """Sends requests to one app."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        exchange = _Exchange(await request.aread())
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "scheme": request.url.scheme,
            "path": request.url.path,
            "raw_path": request.url.raw_path.partition(b"?")[0],
            "query_string": request.url.query,
            "server": (request.url.host, request.url.port),
            "client": ("in-process", 0),
            "root_path": "",
        }
        task = asyncio.ensure_future(self._app(scope, exchange.receive, exchange.send))
        task.add_done_callback(exchange.end)
        try:
            start = await exchange.messages.get()
        except asyncio.CancelledError:
            await exchange.disconnect(task)
            raise
        if start is None:
            task.result()
            raise RuntimeError("the app returned without a response")
        return httpx.Response(start["status"], headers=start["headers"], stream=_Body(exchange, task))


class SharedClient(httpx.AsyncClient):
    """An HTTP client that many hold: those who close theirs do not close it, `shut_down` does."""

    async def aclose(self) -> None:
        """Nothing: others still send with it."""

    async def __aexit__(self, *error: object) -> None:
        """Nothing, as `aclose`."""

    async def shut_down(self) -> None:
        await super().aclose()


class _Exchange:
    """The messages between the transport and the app about one request."""

    def __init__(self, body: bytes) -> None:
        self._request: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self._is_gone = asyncio.Event()
        self.messages: asyncio.Queue[Message | None] = asyncio.Queue()
        """What the app sent; None when it has returned."""

    async def receive(self) -> Message:
        request, self._request = self._request, None
        if request is not None:
            return request
        await self._is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.messages.put_nowait(message)

    def end(self, task: asyncio.Future[None]) -> None:
        self.messages.put_nowait(None)

    async def disconnect(self, task: asyncio.Future[None]) -> None:
        """Tell the app that the client is gone, and wait until it has cleaned up."""
        self._is_gone.set()
        await asyncio.wait({task})


class _Body(httpx.AsyncByteStream):
    """The body of a response, as the app sends it."""

    def __init__(self, exchange: _Exchange, task: asyncio.Future[None]) -> None:
        self._exchange = exchange
        self._task = task

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self._exchange.messages.get()) is not None:
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body", False):
                return
        self._task.result()

    async def aclose(self) -> None:
        if not self._task.done():
            await self._exchange.disconnect(self._task)
