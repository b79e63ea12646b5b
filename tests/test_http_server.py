"""Servers on sockets: which requests of web pages they refuse, and how long they wait for a body."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tunesmith import http_server
from tunesmith.http_server import serve_app

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
    async with serve_app(Starlette(routes=[Route("/", answer)]), has_key=True) as url, httpx.AsyncClient() as client:
        assert (await client.get(url)).json() == 1


def test_a_server_whose_end_is_cancelled_closes_its_listener_before_its_owner_does():
    async def serve(started):
        async with serve_app(Starlette(), has_key=True):
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


async def echo(request):
    return Response(await request.body())


APP = Starlette(routes=[Route("/", echo, methods=["GET", "POST"]), Route("/data", echo, methods=["GET", "POST"])])


async def ask(url, headers, path="/data", method="POST"):
    async with httpx.AsyncClient() as client:
        return await client.request(method, f"{url}{path}", headers=headers)


HOSTS = {
    **dict.fromkeys(["127.0.0.1:7860", "localhost:9999", "LOCALHOST", "[::1]:7860", "127.0.0.2"], 200),
    **dict.fromkeys(["evil.example", "127.0.0.1.evil.example:7860", "localhost.evil:1", "[::2]", "", "[bad"], 403),
    **dict.fromkeys(["evil@localhost.x", "0.0.0.0:80", "192.168.1.5"], 403),
}


@pytest.mark.parametrize("host", HOSTS)
async def test_a_server_of_this_machine_answers_to_names_of_this_machine(host):
    async with serve_app(APP, has_key=False) as url:
        reply = await ask(url, {"Host": host})
        assert reply.status_code == HOSTS[host]
        if reply.status_code == 403:
            assert repr(host) in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Sec-Fetch-Mode": "cors"}, 200),  # Node.js
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "{url}"}, 200),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 403),
        ({"Origin": "{url}"}, 200),
        ({"Origin": "{url}0"}, 403),
        ({"Origin": "http://127.0.0.1"}, 403),
        ({"Origin": ""}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://evil.example"}, 403),
    ],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_requests_of_other_pages_are_refused(headers, status, host):
    async with serve_app(APP, has_key=False, host=host) as url:
        sent = {name: value.format(url=url) for name, value in headers.items()}
        assert (await ask(url, sent)).status_code == status


async def test_links_of_other_pages_lead_to_the_front_page_only():
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    async with serve_app(APP, has_key=False) as url:
        assert (await ask(url, link, path="/", method="GET")).status_code == 200
        assert (await ask(url, link, path="/data", method="GET")).status_code == 403
        assert (await ask(url, link, path="/", method="POST")).status_code == 403


async def test_a_server_of_the_network_is_reached_under_any_name():
    async with serve_app(APP, has_key=False, host="0.0.0.0") as url:
        assert (await ask(url, {"Host": "search.cluster.example:1243"})).status_code == 200


async def test_with_a_key_any_name_and_page_is_left_to_the_key():
    async with serve_app(APP, has_key=True) as url:
        headers = {"Host": "host.docker.internal:80", "Origin": "https://app.example.com"}
        assert (await ask(url, headers)).status_code == 200


HALF = b"POST /data HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8\r\n\r\nhalf"


@pytest.mark.parametrize("has_key", [False, True])
async def test_a_body_that_stops_arriving_is_answered_and_the_connection_closed(monkeypatch, has_key):
    monkeypatch.setattr(http_server, "BODY_TIMEOUT_S", 0.2)
    async with serve_app(APP, has_key=has_key) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(HALF)
        reply = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert reply.startswith(b"HTTP/1.1 408 ") and b"did not arrive within 0.2 s" in reply


async def test_a_slow_body_is_read_to_its_end(monkeypatch):
    monkeypatch.setattr(http_server, "BODY_TIMEOUT_S", 1.0)

    async def send():
        for _ in range(6):
            yield b"part"
            await asyncio.sleep(0.3)

    async with serve_app(APP, has_key=False) as url, httpx.AsyncClient() as client:
        assert (await client.post(f"{url}/data", content=send())).content == 6 * b"part"


async def test_a_body_that_arrives_while_the_event_loop_is_blocked_is_in_time(monkeypatch):
    monkeypatch.setattr(http_server, "BODY_TIMEOUT_S", 1.0)
    async with serve_app(APP, has_key=False) as url:
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
            connection.sendall(HALF)
            await asyncio.sleep(0.2)
            rest = threading.Timer(0.3, connection.sendall, [b"half"])
            rest.start()
            time.sleep(2.0)  # noqa: ASYNC251 - as an update of the model
            rest.join()
            reply = await asyncio.to_thread(connection.recv, 4096)
            assert reply.startswith(b"HTTP/1.1 200 ")


async def test_an_answer_may_take_longer_than_a_body(monkeypatch):
    monkeypatch.setattr(http_server, "BODY_TIMEOUT_S", 0.1)

    async def answer(request):
        await request.body()
        await asyncio.sleep(0.4)
        return Response("done")

    async with serve_app(Starlette(routes=[Route("/data", answer, methods=["POST"])]), has_key=False) as url:
        assert (await ask(url, {})).text == "done"
