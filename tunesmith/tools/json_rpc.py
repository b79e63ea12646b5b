"""JSON-RPC 2.0 with a server: a child process with one message a line, or a URL as in MCP's streamable HTTP.

Calls block; they may come from any thread, and so from any event loop (`asyncio.to_thread`). A call ends with the
server's result, with `RpcError` (the server refused it), with `TimeoutError` (the server is asked to cancel it), or
with `ServerLostError`: the process has ended, or the URL does not answer. Nothing is sent to a lost server again.

    -> {"jsonrpc": "2.0", "id": 1, "method": "add", "params": {"a": 1, "b": 2}}
    <- {"jsonrpc": "2.0", "id": 1, "result": 3}

Requests of the server are answered too: `ping` by an empty result, others by an error, since it was offered nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import IO, Any, TypeAlias, Union

import httpx

from tunesmith.errors import ServerLostError, ToolUnavailableError

METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
END_TIMEOUT_S = 2.0
"""Seconds that a process has to end by itself once its input is closed."""
NUM_LOG_BYTES = 4000
MAX_SHOWN_CHARS = 300

Message = dict[str, Any]
Server: TypeAlias = Union["ServerProcess", "HttpServer"]


class RpcError(Exception):
    """The server answered a call with an error."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(str(error.get("message") or error)[:MAX_SHOWN_CHARS])
        self.code = error.get("code")


def build_message(method: str, params: Mapping[str, Any], **fields: Any) -> Message:
    return {"jsonrpc": "2.0", **fields, "method": method, "params": dict(params)}


def build_cancellation(number: int) -> Message:
    return build_message("notifications/cancelled", {"requestId": number, "reason": "time limit"})


def answer_request(request: Message) -> Message:
    """The answer to a request of the server."""
    if request["method"] == "ping":
        return {"jsonrpc": "2.0", "id": request["id"], "result": {}}
    error = {"code": METHOD_NOT_FOUND, "message": f"{request['method']} is not supported"}
    return {"jsonrpc": "2.0", "id": request["id"], "error": error}


def read_result(reply: Message) -> Any:
    if isinstance(reply.get("error"), dict):
        raise RpcError(reply["error"])
    return reply.get("result")


class SharedServer:
    """A server that serves all rollouts: opened when it is first used, and again after it was lost."""

    def __init__(self, connect: Callable[[], Server]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._server: Server | None = None

    def get(self) -> Server:
        with self._lock:
            if self._server is None:
                self._server = self._connect()
            return self._server

    def forget(self, server: Server) -> None:
        """Close a server, this one or another; if it was this one, the next use opens another."""
        with self._lock:
            if server is self._server:
                self._server = None
        server.close()


class _Channel:
    """The pipes of a process; the thread that reads them keeps this alive, and not the `ServerProcess`."""

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self._stdin, self._stdout = stdin, stdout
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Message]] = {}
        self.is_ended = False
        self.strange_line = ""
        """The last line that was no message; servers that print to their standard output write such lines."""

    def send(self, message: Message) -> None:
        with self._lock:
            self._stdin.write(json.dumps(message).encode() + b"\n")
            self._stdin.flush()

    @contextlib.contextmanager
    def expect(self, number: int) -> Iterator[Future[Message]]:
        """The future of a reply; it is cancelled when the process ends."""
        future: Future[Message] = Future()
        self._waiting[number] = future
        if self.is_ended:
            future.cancel()
        try:
            yield future
        finally:
            self._waiting.pop(number, None)

    def read(self) -> None:
        """Deliver replies until the process closes its output."""
        with contextlib.suppress(OSError, ValueError):
            for line in self._stdout:
                self._deliver(line)
        self.is_ended = True
        for future in list(self._waiting.values()):
            future.cancel()

    def _deliver(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            self.strange_line = line.decode(errors="replace").strip() or self.strange_line
        elif "method" not in message:
            future = self._waiting.get(message.get("id", 0))
            if future is not None and not future.done():
                future.set_result(message)
        elif "id" in message:
            self.send(answer_request(message))

    def close(self) -> None:
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                pipe.close()


class ServerProcess:
    """A child process that is a server; it also ends when this process does.

    `call` returns the result of a method, `notify` sends a message that has none, and `close` ends the process, whose
    calls then fail.
    """

    def __init__(self, command: Sequence[str], *, label: str) -> None:
        """`label` names the server in messages."""
        self.label = label
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True
            )
        except OSError as error:
            self._log.close()
            raise ToolUnavailableError(f"{label} cannot be started: {error.strerror}: {error.filename}") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._channel = _Channel(self._process.stdin, self._process.stdout)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._cause = f"{label} is closed"
        """Why the server has ended; read once, by the first call that finds it ended."""
        threading.Thread(target=self._channel.read, name="tunesmith-server", daemon=True).start()
        self._end = weakref.finalize(self, _end_process, self._process, self._channel, self._log, os.getpid())

    def call(self, method: str, params: Mapping[str, Any], *, timeout_s: float | None) -> Any:
        number = next(self._numbers)
        with self._channel.expect(number) as reply:
            self._send(build_message(method, params, id=number))
            try:
                return read_result(reply.result(timeout_s))
            except TimeoutError:
                self._send(build_cancellation(number))
                shown = self._channel.strange_line[:MAX_SHOWN_CHARS]
                raise TimeoutError(f"its last output was {shown!r}, which is no JSON-RPC" if shown else "") from None
            except CancelledError:
                raise ServerLostError(self._explain_end()) from None

    def notify(self, method: str, params: Mapping[str, Any]) -> None:
        self._send(build_message(method, params))

    def close(self) -> None:
        self._end()

    def _send(self, message: Message) -> None:
        try:
            self._channel.send(message)
        except (OSError, ValueError) as error:  # ValueError: the pipe is closed
            raise ServerLostError(self._explain_end()) from error

    def _explain_end(self) -> str:
        with self._lock:
            if self._end.alive:
                self._cause = self._read_cause()
                self.close()
            return self._cause

    def _read_cause(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        self._log.seek(-min(NUM_LOG_BYTES, self._log.seek(0, os.SEEK_END)), os.SEEK_END)
        lines = [each.strip() for each in self._log.read().decode(errors="replace").splitlines()]
        last = next((each for each in reversed(lines) if each), self._channel.strange_line or "it wrote no error")
        return f"{self.label} has ended (status {self._process.returncode}): {last[:MAX_SHOWN_CHARS]}"


def _end_process(process: subprocess.Popen[bytes], channel: _Channel, log: IO[bytes], owner: int) -> None:
    """Close the input, at whose end a server ends; kill what is left of it and of what it started."""
    if os.getpid() != owner:
        return  # a forked copy of this process does not own the server
    with contextlib.suppress(OSError):
        assert process.stdin is not None
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    channel.close()
    log.close()


class HttpServer:
    """A server with MCP's streamable HTTP: each message is a POST, whose response is JSON or a stream of events.

    The methods are those of `ServerProcess`; `close` ends the session at the URL.
    """

    def __init__(self, url: str, *, headers: Mapping[str, str], label: str) -> None:
        self.label = label
        self._url = url
        self._client = httpx.Client(
            headers=dict(headers), limits=httpx.Limits(max_connections=None), follow_redirects=True
        )
        self._session: dict[str, str] = {}
        """Headers that the server expects once it is initialized."""
        self._numbers = itertools.count(1)
        self._end = weakref.finalize(self, _end_session, self._client, url, self._session, os.getpid())

    def call(self, method: str, params: Mapping[str, Any], *, timeout_s: float) -> Any:
        number = next(self._numbers)
        message = build_message(method, params, id=number)
        try:
            result = read_result(self._exchange(message, deadline=time.monotonic() + timeout_s))
        except (httpx.TimeoutException, TimeoutError):
            with contextlib.suppress(ServerLostError, ToolUnavailableError, httpx.TimeoutException):
                self._post(build_cancellation(number))
            raise TimeoutError from None
        if method == "initialize":
            self._session["mcp-protocol-version"] = str(result["protocolVersion"])
        return result

    def notify(self, method: str, params: Mapping[str, Any]) -> None:
        self._post(build_message(method, params))

    def close(self) -> None:
        self._end()

    def _post(self, message: Message) -> None:
        """Send a message to which the server answers nothing."""
        with self._send(message, timeout_s=END_TIMEOUT_S):
            pass

    def _exchange(self, message: Message, *, deadline: float) -> Message:
        """Send a request; its reply."""
        with self._send(message, timeout_s=deadline - time.monotonic()) as response:
            for text in iter_texts(response):
                if time.monotonic() > deadline:
                    raise TimeoutError
                try:
                    received = json.loads(text)
                    is_reply = "method" not in received and received["id"] == message["id"]
                except (ValueError, TypeError, KeyError) as error:
                    shown = text[:MAX_SHOWN_CHARS]
                    raise ToolUnavailableError(f"{self.label} answered no JSON-RPC but {shown!r}") from error
                if is_reply:
                    reply: Message = received
                    return reply
                if "id" in received and "method" in received:
                    self._post(answer_request(received))
        raise ServerLostError(f"{self.label} ended its response without an answer")

    @contextlib.contextmanager
    def _send(self, message: Message, *, timeout_s: float) -> Iterator[httpx.Response]:
        headers = {"accept": "application/json, text/event-stream", **self._session}
        try:
            with self._client.stream("POST", self._url, json=message, headers=headers, timeout=timeout_s) as response:
                if response.status_code >= 400:
                    text = " ".join(response.read().decode(errors="replace").split())[:MAX_SHOWN_CHARS]
                    is_lost = response.status_code == 404 and "mcp-session-id" in self._session
                    kind = ServerLostError if is_lost or response.status_code >= 500 else ToolUnavailableError
                    raise kind(f"{self.label} answered with status {response.status_code}: {text}")
                if "mcp-session-id" in response.headers:
                    self._session["mcp-session-id"] = response.headers["mcp-session-id"]
                yield response
        except httpx.TimeoutException:
            raise
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise ServerLostError(f"{self.label} does not answer: {error or type(error).__name__}") from error
        except RuntimeError as error:
            if not self._client.is_closed:
                raise
            raise ServerLostError(f"{self.label} is closed") from error


def iter_texts(response: httpx.Response) -> Iterator[str]:
    """The messages of a response, one if it is JSON, or the data of each event."""
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        yield response.read().decode(errors="replace")
        return
    data: list[str] = []
    for line in response.iter_lines():
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and any(data):
            yield "\n".join(data)
            data = []


def _end_session(client: httpx.Client, url: str, session: Mapping[str, str], owner: int) -> None:
    if os.getpid() == owner and "mcp-session-id" in session:
        with contextlib.suppress(httpx.HTTPError):
            client.delete(url, headers=dict(session), timeout=END_TIMEOUT_S)
    client.close()
