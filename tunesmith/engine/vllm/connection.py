"""The socket to the vLLM process: frames of JSON, read by the event loop or by whoever waits for a reply.

Everything runs in the thread of the event loop. While that thread waits in `call` it reads the socket itself, so
replies and tokens are handled in the order in which they were sent.
"""

from __future__ import annotations

import asyncio
import json
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from tunesmith.errors import EngineError

CHUNK_BYTES = 2**20


class Connection:
    """Frames to and from the vLLM process."""

    def __init__(
        self,
        own: socket.socket,
        *,
        on_event: Callable[[dict[str, Any]], None],
        on_end: Callable[[], None],
        explain_end: Callable[[], str],
    ) -> None:
        """`on_event` receives the events of requests, `on_end` is called once the process has closed the socket, and
        `explain_end` says why it has."""
        self._socket = own
        self._on_event, self._on_end, self._explain_end = on_event, on_end, explain_end
        self._buffer = bytearray()
        self._replies: dict[int, dict[str, Any]] = {}
        self._num_calls = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self.is_open = True

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let this event loop read the socket."""
        if loop is self._loop or not self.is_open:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
        self._loop = loop
        loop.add_reader(self._socket, self._read)

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; raise EngineError if the process has ended."""
        body = json.dumps(message).encode()
        try:
            self._socket.sendall(len(body).to_bytes(4, "big") + body)
        except OSError as error:
            self._end()
            raise EngineError(self._explain_end()) from error

    def call(self, method: str, *, timeout_s: float, **arguments: Any) -> Any:
        """Call a method of the server and wait for its result, while the event loop stands still."""
        self._num_calls += 1
        seq = self._num_calls
        self.send({"op": "call", "seq": seq, "method": method, "arguments": arguments})
        return self.wait_for_reply(seq, work=method, timeout_s=timeout_s)

    def wait_for_reply(self, seq: int, *, work: str, timeout_s: float) -> Any:
        """The result of a call; reply 0 says that the engine has started."""
        self.wait_until(lambda: seq in self._replies, work=work, timeout_s=timeout_s)
        reply = self._replies.pop(seq)
        if "error" in reply:
            raise EngineError(f"vLLM could not {work.replace('_', ' ')}: {reply['error']}")
        return reply["result"]

    def wait_until(self, is_done: Callable[[], bool], *, work: str, timeout_s: float) -> None:
        """Read until `is_done()`; raise EngineError if the process ends or the time is over."""
        deadline = time.monotonic() + timeout_s
        while not is_done():
            if not self.is_open:
                raise EngineError(self._explain_end())
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise EngineError(f"vLLM has not answered to {work.replace('_', ' ')} within {timeout_s:g} s")
            if select.select([self._socket], [], [], min(left_s, 1.0))[0]:
                self._read()

    def close(self) -> None:
        """Close the socket; the server ends."""
        if self.is_open:
            self._detach()
            self._socket.close()

    def _read(self) -> None:
        try:
            chunk = self._socket.recv(CHUNK_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return  # a call has read what the event loop was woken for
        except OSError:
            chunk = b""
        if not chunk:
            self._end()
            return
        self._buffer += chunk
        start = 0
        while len(self._buffer) - start >= 4:
            stop = start + 4 + int.from_bytes(self._buffer[start : start + 4], "big")
            if stop > len(self._buffer):
                break
            for event in json.loads(bytes(self._buffer[start + 4 : stop])):
                if "seq" in event:
                    self._replies[event["seq"]] = event
                else:
                    self._on_event(event)
            start = stop
        del self._buffer[:start]

    def _end(self) -> None:
        if self.is_open:
            self._detach()
            self._on_end()

    def _detach(self) -> None:
        self.is_open = False
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
