"""Connections between the first rank and each other one, for messages that must not wait for a collective.

Messages are frozen dataclasses. They are received by coroutines, so agents and engines of the receiving rank go on.
Each end sends `Alive` at intervals while its event loop runs: a rank whose rollouts take hours is alive, one whose loop
hangs is not. A question (`ask_for`) gets the other rank's next answer, so a rank answers in the order of the questions.
A rank accepts messages only from ranks that know a secret of the run; it is broadcast in the process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import operator
import os
import pickle
import secrets
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from tunesmith.cluster.ranks import Ranks
from tunesmith.errors import RankError

P = ParamSpec("P")
T = TypeVar("T")

SECRET_BYTES = 32
HEADER = struct.Struct("!Q")
"""Number of bytes of the message that follows."""
GREETING_TIMEOUT_S = 10.0
"""A connection that has not sent the secret by then is not a rank's; others wait behind it."""
NUM_INTERVALS = 4
"""Messages `Alive` in the longest time without a message."""
LOST = "another rank has ended: its own message says why; resume the run from its last checkpoint with --resume"


@dataclass(frozen=True, slots=True)
class Alive:
    """The event loop of the sender runs."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a method of the object that carries out the messages on the other rank."""

    work: operator.methodcaller
    is_answered: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """Answers the oldest question that has no answer."""

    value: Any


class Link:
    """One end of a connection between two ranks, used in one event loop."""

    def __init__(self, connected: socket.socket, *, timeout_s: float) -> None:
        """`timeout_s`: longest time in which a rank that waits for a message hears nothing."""
        self._socket = connected
        self._timeout_s = timeout_s
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._beating: asyncio.Task[None] | None = None
        self._questions: deque[asyncio.Future[Any]] = deque()
        """The answers that are awaited, in order."""
        self._error: Exception | None = None

    async def open(self) -> None:
        """Use the connection in the running event loop, once."""
        if self._streams is not None:
            return
        self._socket.setblocking(False)
        self._streams = await asyncio.open_connection(sock=self._socket)
        self._streams[1].transport.set_write_buffer_limits(0)  # so that `drain` waits until everything is sent
        self._beating = asyncio.create_task(self._beat())

    def send(self, message: object) -> None:
        """Send a message without waiting for the other rank."""
        assert self._streams is not None, "open() was called"
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._streams[1].write(HEADER.pack(len(data)) + data)

    def call(self, method: Callable[Concatenate[Any, P], object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a method on the other rank without waiting for it."""
        self.send(Call(operator.methodcaller(method.__name__, *args, **kwargs), is_answered=False))

    def ask_for(
        self, method: Callable[Concatenate[Any, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Call a method on the other rank, for its result; it arrives, after others, while someone waits in
        `receive`."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may be awaited by nobody
        if self._error is None:
            self.send(Call(operator.methodcaller(method.__name__, *args, **kwargs), is_answered=True))
            self._questions.append(answer)
        else:
            answer.set_exception(self._error)
        return answer

    async def carry_out(self, call: Call, target: object) -> None:
        """Make a call of the other rank on the target, and send the result if it waits for it."""
        result = call.work(target)
        if inspect.isawaitable(result):
            result = await result
        if call.is_answered:
            self.send(Answer(result))

    def fail(self, error: Exception) -> None:
        """Nothing is received any more: questions raise the error, unless there was another before."""
        self._error = self._error or error
        for question in self._questions:
            if not question.done():
                question.set_exception(self._error)

    async def drain(self) -> None:
        """Wait until all messages have left this process: the loop may then be blocked by a collective."""
        assert self._streams is not None, "open() was called"
        try:
            await self._streams[1].drain()
        except OSError as error:
            raise RankError(LOST) from error

    async def receive(self) -> Any:
        """Wait for the next message; raises RankError when the other rank has ended, or was silent for too long."""
        try:
            while isinstance(message := await self._receive(), Alive | Answer):
                if isinstance(message, Answer):
                    question = self._questions.popleft()
                    if not question.done():  # whoever asked is gone
                        question.set_result(message.value)
        except RankError as error:
            self.fail(error)
            raise
        return message

    async def _receive(self) -> Any:
        """The next message. Silence is counted in intervals: a loop that was blocked itself has heard nobody."""
        reading = asyncio.ensure_future(self._read())
        try:
            for _ in range(NUM_INTERVALS):
                done, _ = await asyncio.wait({reading}, timeout=self._timeout_s / NUM_INTERVALS)
                if done:
                    return reading.result()
        finally:
            reading.cancel()
        raise RankError(
            f"no message of another rank came within cluster.timeout_s={self._timeout_s:g}: it hangs; raise "
            "cluster.timeout_s, or resume the run from its last checkpoint with --resume"
        )

    async def _read(self) -> Any:
        assert self._streams is not None, "open() was called"
        reader = self._streams[0]
        try:
            (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
            return pickle.loads(await reader.readexactly(size))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise RankError(LOST) from error

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._timeout_s / NUM_INTERVALS)
            self.send(Alive())

    async def close(self) -> None:
        """Send what is left, and close the connection."""
        if self._streams is None:
            self._socket.close()
            return
        assert self._beating is not None
        self._beating.cancel()
        writer = self._streams[1]
        writer.close()
        try:
            await writer.wait_closed()
        except OSError:
            return  # the other rank has ended


Links = Mapping[int, Link]
"""The links of a rank by the other end: to all others on the first rank, to the first one on the others."""
NO_LINKS: Links = {}


def connect_links(ranks: Ranks, *, timeout_s: float) -> Links:
    """Connect the first rank with each other one; all ranks call this."""
    if ranks.is_alone:
        return NO_LINKS
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        if ranks.is_first:
            return accept_links(ranks, host, timeout_s=timeout_s)
        address: tuple[int, bytes] = ranks.broadcast_object()
        port, secret = address
        connected = socket.create_connection((host, port), timeout=timeout_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.sendall(secret + HEADER.pack(ranks.rank))
    except OSError as error:
        raise RankError(
            f"rank {ranks.rank} cannot connect to the first rank at MASTER_ADDR={host} ({error}): check that the hosts "
            "reach each other on all ports"
        ) from error
    return {0: Link(connected, timeout_s=timeout_s)}


def accept_links(ranks: Ranks, host: str, *, timeout_s: float) -> Links:
    """Wait on the first rank until all others are connected."""
    secret = secrets.token_bytes(SECRET_BYTES)
    links: dict[int, Link] = {}
    is_local = host in ("localhost", "127.0.0.1")
    with socket.create_server(("127.0.0.1" if is_local else "", 0), backlog=ranks.world_size) as server:
        # The socket listens before its port is broadcast: peers connect at once, and the others go on without waiting.
        server.settimeout(timeout_s)
        ranks.broadcast_object((server.getsockname()[1], secret))
        while len(links) < ranks.world_size - 1:
            connected, _ = server.accept()
            greeting = receive_greeting(connected, timeout_s=min(timeout_s, GREETING_TIMEOUT_S))
            # any program on the network may connect; without the secret it takes no rank's place
            is_whole = len(greeting) == SECRET_BYTES + HEADER.size
            if not (is_whole and secrets.compare_digest(greeting[:SECRET_BYTES], secret)):
                connected.close()
                continue
            connected.settimeout(timeout_s)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            links[HEADER.unpack(greeting[SECRET_BYTES:])[0]] = Link(connected, timeout_s=timeout_s)
    return dict(sorted(links.items()))


def receive_greeting(connected: socket.socket, *, timeout_s: float) -> bytes:
    """The first bytes of a connection; fewer from a program that is no rank and sends less, resets it, or is silent."""
    connected.settimeout(timeout_s)
    greeting = b""
    with contextlib.suppress(OSError):
        while missing := SECRET_BYTES + HEADER.size - len(greeting):
            received = connected.recv(missing)  # MSG_WAITALL has no effect on a socket with a timeout
            if not received:
                break
            greeting += received
    return greeting
