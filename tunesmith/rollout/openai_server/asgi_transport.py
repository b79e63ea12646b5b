"""HTTP clients that call an ASGI app on an event loop of this process, without a socket.

Unlike `httpx.ASGITransport`, a transport returns the response as soon as it starts and streams the body. Closing the
response, cancelling the caller, or reaching the read timeout of the request appears to the app as a client disconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from types import ModuleType
from typing import Any

import httpx
from starlette.types import ASGIApp, Message

from tunesmith.rollout.user_code import call_on_loop


class _Exchange:
    """The ASGI messages of one request, between transport and app."""

    def __init__(self, body: bytes, *, timeout_s: float | None, library: ModuleType) -> None:
        """`timeout_s`: how long the client waits for each message; None: without limit. `library`: the client's."""
        self._request: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self._disconnected = asyncio.Event()
        self._timeout_s = timeout_s
        self._library = library
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
        """The app's next message; None after it has returned. Raises the `ReadTimeout` of the client's library."""
        try:
            return await asyncio.wait_for(self._messages.get(), self._timeout_s)
        except TimeoutError as error:
            raise self._library.ReadTimeout(f"nothing was received for {self._timeout_s} s") from error

    async def disconnect(self, task: asyncio.Future[None]) -> None:
        """Send the app a disconnect and wait until it has returned."""
        self._disconnected.set()
        await asyncio.wait({task})


def build_transport(app: ASGIApp, library: ModuleType) -> Any:
    """A transport of httpx, or of a library with its interface, such as httpx2."""

    class Body(library.AsyncByteStream):  # type: ignore[name-defined]
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

    class Transport(library.AsyncBaseTransport):  # type: ignore[name-defined]
        async def handle_async_request(self, request: Any) -> Any:
            timeout_s = request.extensions.get("timeout", {}).get("read")
            exchange = _Exchange(await request.aread(), timeout_s=timeout_s, library=library)
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
            task = asyncio.ensure_future(app(scope, exchange.receive, exchange.send))
            task.add_done_callback(exchange.end)
            try:
                start = await exchange.get_message()
            except (asyncio.CancelledError, library.ReadTimeout):
                await exchange.disconnect(task)
                raise
            if start is None:
                task.result()
                raise RuntimeError("the app returned without a response")
            return library.Response(start["status"], headers=start["headers"], stream=Body(exchange, task))

    return Transport()


class SyncTransport(httpx.BaseTransport):
    """Sends the requests of other threads to an ASGI app on an event loop."""

    def __init__(self, app: ASGIApp, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = build_transport(app, httpx)
        self._loop = loop

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        response = call_on_loop(self._loop, lambda: self._transport.handle_async_request(request))
        return httpx.Response(response.status_code, headers=response.headers, stream=_SyncBody(response, self._loop))


class _SyncBody(httpx.SyncByteStream):
    def __init__(self, response: httpx.Response, loop: asyncio.AbstractEventLoop) -> None:
        assert isinstance(response.stream, httpx.AsyncByteStream)
        self._stream = response.stream
        self._loop = loop

    def __iter__(self) -> Iterator[bytes]:
        parts = aiter(self._stream)

        async def get_next() -> bytes | None:
            return await anext(parts, None)

        while (part := call_on_loop(self._loop, get_next)) is not None:
            yield part

    def close(self) -> None:
        call_on_loop(self._loop, self._stream.aclose)


def build_client(kind: type[Any], transport: Any) -> Any:
    """A client shared by many owners: closing it does nothing, since it holds no connection."""

    async def do_nothing(*_: object) -> None:
        return None

    shared = {"close": lambda _: None, "__exit__": lambda *_: None, "aclose": do_nothing, "__aexit__": do_nothing}
    return type(f"Shared{kind.__name__}", (kind,), shared)(transport=transport, trust_env=False, timeout=None)


class InProcessClients:
    """HTTP clients of one app, created on demand and shared by all trajectories."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sync: tuple[asyncio.AbstractEventLoop, httpx.Client] | None = None
        self._async: dict[ModuleType, Any] = {}

    def note_loop(self) -> None:
        """Synchronous clients call the app on the loop that opens the models."""
        with contextlib.suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()

    def get_sync_client(self) -> httpx.Client:
        if self._loop is None:
            raise RuntimeError("a synchronous client needs the event loop of the rollouts, which is not running")
        if self._sync is None or self._sync[0] is not self._loop:
            self._sync = (self._loop, build_client(httpx.Client, SyncTransport(self._app, self._loop)))
        return self._sync[1]

    def get_async_client(self, library: ModuleType = httpx) -> Any:
        if library not in self._async:
            self._async[library] = build_client(library.AsyncClient, build_transport(self._app, library))
        return self._async[library]
