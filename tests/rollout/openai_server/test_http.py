"""The server on a socket."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from tunesmith.rollout.openai_server.http import serve_app

pytestmark = pytest.mark.anyio


async def test_small_answers_are_sent_at_once(monkeypatch):
    """Nagle's algorithm would hold back the body of an answer until the client acknowledges its headers."""
    accepted = []
    accept = socket.socket.accept

    def record(listener):
        connection, address = accept(listener)
        accepted.append(connection)
        return connection, address

    async def answer(request):
        (connection,) = accepted
        return JSONResponse(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(socket.socket, "accept", record)
    async with serve_app(Starlette(routes=[Route("/", answer)])) as url, httpx.AsyncClient() as client:
        assert (await client.get(url)).json() == 1


def test_a_server_whose_end_is_cancelled_closes_its_listener_before_its_owner_does():
    async def serve(started):
        async with serve_app(Starlette()):
            started.set()
            await asyncio.Event().wait()

    async def cancel_twice():
        started = asyncio.Event()
        serving = asyncio.create_task(serve(started))
        await started.wait()
        serving.cancel()
        await asyncio.sleep(0)
        others = asyncio.all_tasks() - {asyncio.current_task(), serving}
        serving.cancel()
        ends = await asyncio.gather(serving, *others, return_exceptions=True)
        return [end for end in ends if isinstance(end, BaseException)]

    (end,) = asyncio.run(cancel_twice())
    assert isinstance(end, asyncio.CancelledError)
