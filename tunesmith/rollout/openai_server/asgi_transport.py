"""An httpx transport that calls an ASGI app in the same event loop, without a socket.

Unlike `httpx.ASGITransport`, it returns the response as soon as it starts and streams the body. Closing the response,
cancelling the caller, or reaching the read timeout of the request appears to the app as a client disconnect.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
from starlette.types import ASGIApp, Message


class InProcessTransport(httpx.AsyncBaseTransport):
    """Sends requests to one ASGI app."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        timeout_s = request.extensions.get("timeout", {}).get("read")
        exchange = _Exchange(await request.aread(), timeout_s=timeout_s)
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
            start = await exchange.get_message()
        except (asyncio.CancelledError, httpx.ReadTimeout):
            await exchange.disconnect(task)
            raise
        if start is None:
            task.result()
            raise RuntimeError("the app returned without a response")
        return httpx.Response(start["status"], headers=start["headers"], stream=_Body(exchange, task))


class SharedClient(httpx.AsyncClient):
    """An HTTP client shared by many owners: `aclose` does nothing, only `shut_down` closes it."""

    async def aclose(self) -> None:
        """Do nothing; other owners still use the client."""

    async def __aexit__(self, *error: object) -> None:
        """Do nothing, as `aclose`."""

    async def shut_down(self) -> None:
        await super().aclose()


class _Exchange:
    """The ASGI messages of one request, between transport and app."""

    def __init__(self, body: bytes, *, timeout_s: float | None) -> None:
        """`timeout_s`: how long the client waits for each message; None: without limit."""
        self._request: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self._disconnected = asyncio.Event()
        self._timeout_s = timeout_s
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        """Messages sent by the app; None after it has returned."""

    async def receive(self) -> Message:
        request, self._request = self._request, None
        if request is not None:
            return request
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self._messages.put_nowait(message)

    def end(self, task: asyncio.Future[None]) -> None:
        self._messages.put_nowait(None)

    async def get_message(self) -> Message | None:
        """The app's next message; None after it has returned. Raises `httpx.ReadTimeout`."""
        try:
            return await asyncio.wait_for(self._messages.get(), self._timeout_s)
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"nothing was received for {self._timeout_s} s") from error

    async def disconnect(self, task: asyncio.Future[None]) -> None:
        """Send the app a disconnect and wait until it has returned."""
        self._disconnected.set()
        await asyncio.wait({task})


class _Body(httpx.AsyncByteStream):
    """The streamed body of a response."""

    def __init__(self, exchange: _Exchange, task: asyncio.Future[None]) -> None:
        self._exchange = exchange
        self._task = task

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self._exchange.get_message()) is not None:
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body", False):
                return
        self._task.result()

    async def aclose(self) -> None:
        if not self._task.done():
            await self._exchange.disconnect(self._task)
