"""JSON-RPC 2.0 with a server: a child process with one message a line, or a URL as in MCP's streamable HTTP.

    -> {"jsonrpc": "2.0", "id": 1, "method": "add", "params": {"a": 1, "b": 2}}
    <- {"jsonrpc": "2.0", "id": 1, "result": 3}

Calls block; they may come from any thread, and so from any event loop (`asyncio.to_thread`). A call ends with the
server's result, with `RpcError` (the server refused it), with `TimeoutError` (the server is asked to cancel it), or
with `ServerLostError`: the process has ended, or the URL does not answer.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import IO, Any, Generic, TypeAlias, TypeVar, Union

import httpx

from tunesmith.errors import ServerLostError, ToolUnavailableError

METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
END_TIMEOUT_S = 2.0
"""Seconds that a process has to end by itself once its input is closed."""
MAX_SHOWN_CHARS = 300

Message = dict[str, Any]
Server: TypeAlias = Union["ServerProcess", "HttpServer"]
AnyServer = TypeVar("AnyServer", bound="ServerProcess | HttpServer")


class RpcError(Exception):
    """The server answered a call with an error."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(str(error.get("message") or error)[:MAX_SHOWN_CHARS])
        self.code = error.get("code")


class SharedServer(Generic[AnyServer]):
    """A server that serves all rollouts: opened when it is first used, and again after it was lost."""

    def __init__(self, connect: Callable[[], AnyServer]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._server: AnyServer | None = None

    def get(self) -> AnyServer:
        with self._lock:
            self._server = self._server or self._connect()
            return self._server

    def forget(self, server: AnyServer) -> None:
        """Close a server, this one or another; if it was this one, the next use opens another."""
        with self._lock:
            self._server = None if server is self._server else self._server
        server.close()

    def close(self) -> None:
        """Close the server, if there is one; the next use opens another."""
        if (server := self._server) is not None:
            self.forget(server)


def build_message(method: str, params: Mapping[str, Any], **fields: Any) -> Message:
    return {"jsonrpc": "2.0", **fields, "method": method, "params": dict(params)}


def encode(message: Message) -> bytes:
    """One line of ASCII, so that it can also carry a lone surrogate, which the model may write."""
    return json.dumps(message).encode()


def answer_request(request: Message) -> Message:
    """The answer to a request of the server: all but a ping are refused, since it was offered nothing."""
    error = {"code": METHOD_NOT_FOUND, "message": f"{request['method']} is not supported"}
    answer = {"result": {}} if request["method"] == "ping" else {"error": error}
    return {"jsonrpc": "2.0", "id": request["id"], **answer}


def read_messages(text: str | bytes) -> list[Message]:
    """The messages in a JSON text: one, or the batch that MCP's version 2025-03-26 has; ValueError for other JSON."""
    parsed = json.loads(text)
    messages = parsed if isinstance(parsed, list) else [parsed]
    if not all(isinstance(each, dict) for each in messages):
        raise ValueError("not an object")
    return messages


def read_result(reply: Message) -> Any:
    if isinstance(reply.get("error"), dict):
        raise RpcError(reply["error"])
    return reply.get("result")


class ServerProcess:
    """A child process that is a server; it also ends when this process does.

    `call` returns the result of a method, `notify` sends a message that has none, and `close` ends the process, whose
    calls then fail. `label` names the server in messages.
    """

    def __init__(self, command: Sequence[str], *, label: str) -> None:
        self.label = label
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        except OSError as error:
            log.close()
            raise ToolUnavailableError(f"{label} cannot be started: {error.strerror}: {error.filename}") from error
        self._log = log
        self._pipes = _Pipes(self._process)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._cause = f"{label} is closed"
        """Why the process has ended; read by the first call that finds it ended."""
        for work in (self._pipes.read, self._pipes.write):
            threading.Thread(target=work, name="tunesmith-server", daemon=True).start()
        self._end = weakref.finalize(self, _end_process, self._process, self._pipes, log, os.getpid())

    def call(self, method: str, params: Mapping[str, Any], *, timeout_s: float | None) -> Any:
        number = next(self._numbers)
        reply = self._pipes.expect(number)
        try:
            self._pipes.send(build_message(method, params, id=number))
            return read_result(reply.result(timeout_s))
        except TimeoutError:
            self.notify("notifications/cancelled", {"requestId": number})
            raise
        except CancelledError:
            raise self._explain_end() from None
        finally:
            self._pipes.waiting.pop(number, None)

    def notify(self, method: str, params: Mapping[str, Any]) -> None:
        if self._pipes.is_ended:
            raise self._explain_end()
        self._pipes.send(build_message(method, params))

    def close(self) -> None:
        self._end()

    def _explain_end(self) -> ServerLostError:
        with self._lock:
            if self._end.alive:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(END_TIMEOUT_S)
                self._log.seek(0)
                lines = self._log.read().decode(errors="replace").split("\n")
                last = next((each.strip() for each in reversed(lines) if each.strip()), "it wrote no error")
                self._end()
                self._cause = f"{self.label} has ended (status {self._process.returncode}): {last[:MAX_SHOWN_CHARS]}"
            return ServerLostError(self._cause)


class _Pipes:
    """Messages to and from a process. The threads that read and write keep this alive, and not the `ServerProcess`.

    A server that does not read fills its pipe, and then a write blocks, as does closing the file meanwhile. So only the
    thread that writes waits for the server, and each thread closes its own file: no call and no end waits for either.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        """Lines that are to be written; None closes the input."""
        self.waiting: dict[Any, Future[Message]] = {}
        """Replies that are expected; cancelled when the process ends."""
        self.is_ended = False

    def send(self, message: Message) -> None:
        self._unsent.put(encode(message) + b"\n")

    def close_input(self) -> None:
        """Close the input once all that was sent has been written."""
        self._unsent.put(None)

    def expect(self, number: int) -> Future[Message]:
        future = self.waiting[number] = Future()
        if self.is_ended:
            future.cancel()
        return future

    def end(self) -> None:
        """Cancel the calls that wait, and those that come."""
        self.is_ended = True
        for number in list(self.waiting):
            if (future := self.waiting.pop(number, None)) is not None:
                future.cancel()

    def write(self) -> None:
        """Write what is sent until the input is to be closed, or the process has closed it."""
        try:
            with contextlib.suppress(OSError), self._stdin:
                while (line := self._unsent.get()) is not None:
                    self._stdin.write(line)
                    self._stdin.flush()
        finally:
            self.end()

    def read(self) -> None:
        """Deliver replies until the process closes its output; lines that are no messages are left out."""
        try:
            with contextlib.suppress(OSError), self._stdout:
                for line in self._stdout:
                    with contextlib.suppress(ValueError, RecursionError, TypeError):
                        for message in read_messages(line):
                            if "method" not in message:
                                if (future := self.waiting.pop(message.get("id"), None)) is not None:
                                    future.set_result(message)
                            elif "id" in message:
                                self.send(answer_request(message))
        finally:
            self.end()


def _end_process(process: subprocess.Popen[bytes], pipes: _Pipes, log: IO[bytes], owner: int) -> None:
    """Close the input, at whose end a server ends; kill what is left of it and of what it started."""
    if os.getpid() != owner:
        return  # a forked copy of this process does not own the server
    pipes.close_input()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    pipes.end()
    log.close()


class HttpServer:
    """A server with MCP's streamable HTTP: each message is a POST, whose response is JSON or a stream of events.

    The methods are those of `ServerProcess`; `close` ends the session at the URL after the calls in flight, which
    are those of other rollouts.
    """

    def __init__(self, url: str, *, headers: Mapping[str, str], label: str) -> None:
        self.label = label
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.Client(headers=dict(headers), limits=limits, follow_redirects=True)
        self._url = url
        self._session: dict[str, str] = {}
        """Headers that the server expects once it is initialized."""
        self._numbers = itertools.count(1)
        self._calls: set[int] = set()
        """Numbers of the calls in flight."""
        self._is_closing = False
        self._end = weakref.finalize(self, _end_session, self._client, url, self._session, os.getpid())

    def call(self, method: str, params: Mapping[str, Any], *, timeout_s: float) -> Any:
        number = next(self._numbers)
        self._calls.add(number)
        try:
            result = read_result(self._exchange(build_message(method, params, id=number), timeout_s))
        except httpx.TimeoutException:
            with contextlib.suppress(ToolUnavailableError, httpx.TimeoutException):
                self.notify("notifications/cancelled", {"requestId": number})
            raise TimeoutError from None
        finally:
            self._calls.discard(number)
            self._end_if_idle()
        if method == "initialize" and isinstance(result, dict):
            self._session["mcp-protocol-version"] = str(result.get("protocolVersion"))
        return result

    def notify(self, method: str, params: Mapping[str, Any]) -> None:
        with self._post(build_message(method, params), END_TIMEOUT_S):
            pass

    def close(self) -> None:
        self._is_closing = True
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._is_closing and not self._calls:
            self._end()

    def _exchange(self, message: Message, timeout_s: float) -> Message:
        """The reply to a request."""
        with self._post(message, timeout_s) as response:
            for text in iter_texts(response):
                try:
                    messages = read_messages(text)
                except (ValueError, RecursionError) as error:
                    shown = text[:MAX_SHOWN_CHARS]
                    raise ToolUnavailableError(f"{self.label} answered no JSON-RPC but {shown!r}") from error
                for received in messages:
                    if "method" in received and "id" in received:
                        with self._post(answer_request(received), END_TIMEOUT_S):
                            pass
                    elif "method" not in received and received.get("id") == message["id"]:
                        return received
        raise ServerLostError(f"{self.label} ended its response without an answer")

    @contextlib.contextmanager
    def _post(self, message: Message, timeout_s: float) -> Iterator[httpx.Response]:
        """The response to a message; reading what has not come after `timeout_s` raises `httpx.TimeoutException`."""
        deadline = time.monotonic() + timeout_s
        headers = {"content-type": "application/json", "accept": "application/json, text/event-stream", **self._session}
        content = encode(message)
        sending = self._client.stream("POST", self._url, content=content, headers=headers, timeout=timeout_s)
        try:
            with sending as response:
                assert isinstance(response.stream, httpx.SyncByteStream)
                response.stream = _TimedStream(response.stream, deadline)
                status = response.status_code
                if status >= 400:
                    text = " ".join(response.read().decode(errors="replace").split())[:MAX_SHOWN_CHARS]
                    is_lost = status >= 500 or (status == 404 and "mcp-session-id" in self._session)
                    kind = ServerLostError if is_lost else ToolUnavailableError
                    raise kind(f"{self.label} answered with status {status}: {text}")
                if "mcp-session-id" in response.headers:
                    self._session["mcp-session-id"] = response.headers["mcp-session-id"]
                yield response
        except httpx.TimeoutException:
            raise
        except (httpx.TransportError, httpx.InvalidURL, RuntimeError) as error:  # RuntimeError: the client is closed
            raise ServerLostError(f"{self.label} does not answer: {error or type(error).__name__}") from error


class _TimedStream(httpx.SyncByteStream):
    """The body of a response up to a point in time, also if it comes in small parts: httpx limits each read alone."""

    def __init__(self, stream: httpx.SyncByteStream, deadline: float) -> None:
        self._stream, self._deadline = stream, deadline

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            if time.monotonic() > self._deadline:
                raise httpx.ReadTimeout("the response was not complete in time")
            yield chunk

    def close(self) -> None:
        self._stream.close()


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
