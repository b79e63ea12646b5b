"""The server on a socket."""

from __future__ import annotations

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
