"""Connections of ranks that something else on the network connects to as well."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time

import pytest

from tunesmith.cluster import links
from tunesmith.cluster.links import HEADER, Link, accept_links
from tunesmith.errors import RankError


class FirstRank:
    """Hands the address to the test instead of to other ranks."""

    world_size = 2

    def __init__(self) -> None:
        self.is_open = threading.Event()

    def broadcast_object(self, address: tuple[int, bytes]) -> None:
        self.address = address
        self.is_open.set()


@pytest.mark.parametrize("kind", ["silent", "reset", "wrong", "ended"])
def test_a_connection_that_is_not_of_a_rank_is_ignored(kind, monkeypatch):
    if kind == "silent":  # the rank behind it has twice as long to send its own greeting
        monkeypatch.setattr(links, "GREETING_TIMEOUT_S", 2.0)
    ranks, found = FirstRank(), []
    thread = threading.Thread(target=lambda: found.append(accept_links(ranks, "127.0.0.1", timeout_s=30)))
    thread.start()
    assert ranks.is_open.wait(30)
    port, secret = ranks.address
    with socket.create_connection(("127.0.0.1", port)) as other:
        if kind == "wrong":
            other.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n")
        elif kind == "ended":  # a rank that dies while it sends
            other.sendall((secret + HEADER.pack(1))[:-3])
            other.close()
        elif kind == "reset":
            other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            other.close()
        with socket.create_connection(("127.0.0.1", port)) as rank:
            rank.sendall(secret + HEADER.pack(1))
            thread.join(30)
    assert list(found[0]) == [1]
    found[0][1]._socket.close()


def test_greeting_in_two_packets_is_that_of_a_rank():
    ranks, found = FirstRank(), []
    thread = threading.Thread(target=lambda: found.append(accept_links(ranks, "127.0.0.1", timeout_s=30)), daemon=True)
    thread.start()
    assert ranks.is_open.wait(30)
    port, secret = ranks.address
    with socket.create_connection(("127.0.0.1", port)) as rank:
        rank.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        rank.sendall(secret)
        time.sleep(0.2)  # until the first half was read
        rank.sendall(HEADER.pack(1))
        thread.join(10)
    assert [list(each) for each in found] == [[1]]
    found[0][1]._socket.close()


class Sums:
    async def add_ten(self, number: int) -> int:
        return number + 10


def test_questions_are_answered_in_order_and_fail_with_the_link():
    async def run() -> None:
        near, far = (Link(end, timeout_s=30) for end in socket.socketpair())
        await near.open()
        await far.open()
        reading = asyncio.create_task(near.receive())
        questions = [near.ask_for(Sums.add_ten, number) for number in range(3)]
        calls = [await far.receive() for _ in questions]
        assert [await call.work(Sums()) for call in calls] == [10, 11, 12]
        questions[1].cancel()
        for call in calls[:2]:
            await far.carry_out(call, Sums())
        far.send("hello")
        assert await reading == "hello"
        assert questions[0].result() == 10
        await far.close()
        with pytest.raises(RankError, match="another rank has ended"):
            await near.receive()
        for lost in (questions[2], near.ask_for(Sums.add_ten, 3)):
            with pytest.raises(RankError, match="another rank has ended"):
                await lost
        await near.close()

    asyncio.run(run())
