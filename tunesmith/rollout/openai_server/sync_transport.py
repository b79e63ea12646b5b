"""HTTP clients that call an ASGI app on the event loop: synchronous ones, and those of other HTTP libraries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from types import ModuleType
from typing import Any

import httpx
from starlette.types import ASGIApp

from tunesmith.rollout.openai_server.asgi_transport import InProcessTransport
from tunesmith.rollout.sync_code import call_on_loop


class SyncTransport(httpx.BaseTransport):
    """Sends the requests of other threads to an ASGI app on an event loop."""

    def __init__(self, app: ASGIApp, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = InProcessTransport(app)
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


class _SharedSyncClient(httpx.Client):
    """A client shared by many owners: closing it does nothing, since it holds no connection."""

    def close(self) -> None:
        """Do nothing; other owners still use the client."""

    def __exit__(self, *error: object) -> None:
        """Do nothing, as `close`."""


def build_sync_client(app: ASGIApp, loop: asyncio.AbstractEventLoop) -> httpx.Client:
    """A synchronous HTTP client for threads, which may be shared."""
    return _SharedSyncClient(transport=SyncTransport(app, loop), trust_env=False, timeout=None)


def build_async_client(app: ASGIApp, library: ModuleType) -> Any:
    """An async HTTP client of a library with httpx's interface, such as httpx2; it may be shared."""
    transport = InProcessTransport(app)

    class Body(library.AsyncByteStream):  # type: ignore[name-defined]
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            try:
                async for part in self._stream:
                    yield part
            except httpx.ReadTimeout as error:
                raise library.ReadTimeout(str(error)) from error

        async def aclose(self) -> None:
            await self._stream.aclose()

    class Transport(library.AsyncBaseTransport):  # type: ignore[name-defined]
        async def handle_async_request(self, request: Any) -> Any:
            content = await request.aread()
            copied = httpx.Request(
                request.method,
                str(request.url),
                headers=request.headers.raw,
                content=content,
                extensions={"timeout": request.extensions.get("timeout", {})},
            )
            try:
                response = await transport.handle_async_request(copied)
            except httpx.ReadTimeout as error:
                raise library.ReadTimeout(str(error), request=request) from error
            headers = response.headers.raw
            return library.Response(response.status_code, headers=headers, stream=Body(response.stream))

    class SharedClient(library.AsyncClient):  # type: ignore[name-defined]
        async def aclose(self) -> None:
            """Do nothing; other owners still use the client."""

        async def __aexit__(self, *error: object) -> None:
            """Do nothing, as `aclose`."""

    return SharedClient(transport=Transport(), trust_env=False, timeout=None)
