"""Servers on sockets: the model endpoint over HTTP, `tunesmith serve`, `tunesmith search serve` and the viewer.

Web pages that are open on a machine can send requests to the servers of that machine, and read the answers if a domain
name of theirs resolves to 127.0.0.1 (DNS rebinding). A browser sends no key of its own accord, so a server with a key
leaves it to the key who may use it. A server without one refuses requests of pages of another origin, and if it listens
on a loopback address, requests whose Host is another name. On another address it is reached under names that it cannot
know.

A request whose body stops arriving for `BODY_TIMEOUT_S` is answered 408, so that no client keeps a connection, and one
of the requests that a server accepts at once, for ever. Apps that are called in process have none of this.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import math
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tunesmith.config.serve import is_loopback
from tunesmith.errors import ConfigError

SHUTDOWN_GRACE_S = 2
TICK_S = 1.0
BACKLOG = 2048
BODY_TIMEOUT_S = 30.0


class BodyTooLargeError(Exception):
    """The body of a request is longer than what the server reads."""


def read_key(scope: Scope) -> str | None:
    """The key of a request: its bearer token, or Anthropic's x-api-key."""
    scheme, _, key = read_header(scope, b"authorization").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return read_header(scope, b"x-api-key").strip() or None


def has_key(scope: Scope, key: str | None) -> bool:
    """Whether a request has the key of the server; None asks for none."""
    return key is None or hmac.compare_digest((read_key(scope) or "").encode(), key.encode())


def read_header(scope: Scope, name: bytes) -> str:
    """The first header with this name, or empty text."""
    for each, value in scope["headers"]:
        if each == name:
            return value.decode("latin-1")
    return ""


async def read_body(scope: Scope, receive: Receive, max_bytes: float = math.inf) -> bytes:
    """The body of a request.

    Raises:
        BodyTooLargeError: its declared or actual length exceeds the limit; it is then not read to its end.
        ClientDisconnect: the client is gone.
    """
    declared = read_header(scope, b"content-length")
    if declared.isdigit() and int(declared) > max_bytes:
        raise BodyTooLargeError
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > max_bytes:
            raise BodyTooLargeError
        if not message.get("more_body", False):
            return b"".join(parts)


async def wait_disconnect(receive: Receive) -> None:
    """Return when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class DisconnectWatch:
    """Cancels the current task once the client of its request is gone, until the watch ends.

    It advances `wait_disconnect` itself, from one future to the next: a task of its own would take as long as parsing
    the request. The body must have been read.
    """

    def __init__(self, receive: Receive) -> None:
        self._is_disconnected = False
        self._task = asyncio.current_task()
        self._waiting = wait_disconnect(receive)
        self._advance()

    def _advance(self, _: object = None) -> None:
        if self._task is None:
            return
        try:
            self._waiting.send(None).add_done_callback(self._advance)
        except StopIteration:
            asyncio.get_running_loop().call_soon(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._is_disconnected = True
            self._task.cancel()

    @property
    def has_cancelled(self) -> bool:
        """Whether the watch, and nobody else, has cancelled the task."""
        return self._is_disconnected and self._task is not None and self._task.cancelling() <= 1

    def end(self) -> None:
        if self._is_disconnected and self._task is not None:
            self._task.uncancel()
        self._task = None
        self._waiting.close()


class SocketGuard:
    """An app behind a socket: refuses requests of web pages, and bodies that stop arriving."""

    def __init__(self, app: ASGIApp, *, address: str, has_key: bool, public_url: str | None = None) -> None:
        """`address`: where the socket listens. `public_url`: under which it is reached too, such as that of a proxy."""
        self._app = app
        self._has_key = has_key
        self._is_local = is_loopback(address)
        self._public_name = None if public_url is None else find_name(public_url.partition("://")[2])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = None if self._has_key else self._find_refusal(scope)
        if refusal is not None:
            await answer_and_close(403, refusal)(scope, receive, send)
            return
        request = _TimedRequest(scope, receive, send)
        await self._app(scope, request.receive, request.send)

    def _find_refusal(self, scope: Scope) -> str | None:
        """Why a request may come from a web page; None if it does not."""
        headers = dict(reversed(scope["headers"]))  # the first of each name
        host = headers.get(b"host", b"").decode("latin-1")
        origin = headers[b"origin"].decode("latin-1") if b"origin" in headers else None
        is_public = self._public_name is not None and find_name(host) == self._public_name
        if self._is_local and not is_loopback_host(host) and not is_public:
            known = "localhost and 127.0.0.1" + (f" and {self._public_name}" if self._public_name else "")
            return f"Host {host[:200]!r}: without a key, this server answers requests to {known} only"
        is_foreign = headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin")
        if origin is not None and origin.lower().partition("://")[2] != host.lower():
            is_foreign = True
        # the front page changes nothing, and links of other pages may lead to it
        is_link = (scope["method"], scope["path"], headers.get(b"sec-fetch-mode")) == ("GET", "/", b"navigate")
        if is_foreign and not is_link:
            page = "a web page" if origin is None else f"the web page {origin[:200]!r}"
            return f"without a key, this server answers no requests of other web pages; this one is of {page}"
        return None


def find_name(host: str) -> str | None:
    """The name or the address in a Host header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


@functools.lru_cache(maxsize=64)  # takes as long as the other checks together
def is_loopback_host(host: str) -> bool:
    """Whether a Host header, with any port, names this machine."""
    return is_loopback(find_name(host) or "")


class _TimedRequest:
    """A request that is answered 408 if its body stops arriving; for the app, the client is then gone."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._has_body = False
        self._has_answer = False
        self._is_late = False

    async def receive(self) -> Message:
        if self._has_body:
            return await self._receive()
        message = None if self._is_late else self._receive_at_once() or await self._receive_in_time()
        if message is None:
            if not self._is_late and not self._has_answer:
                sentence = f"the rest of the request's body did not arrive within {BODY_TIMEOUT_S:g} s"
                await answer_and_close(408, sentence)(self._scope, self._receive, self._send)
            self._is_late = True
            return {"type": "http.disconnect"}
        self._has_body = not message.get("more_body", False)
        return message

    def _receive_at_once(self) -> Message | None:
        """What has arrived; most bodies come with their head, and need no timer."""
        received: Any = self._receive()
        try:
            received.send(None)
        except StopIteration as end:
            return end.value
        finally:
            received.close()
        return None

    async def _receive_in_time(self) -> Message | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._receive()
        # the event loop may not have run for as long as that, for instance during an update
        return self._receive_at_once()

    async def send(self, message: Message) -> None:
        if not self._is_late:
            self._has_answer = True
            await self._send(message)


def answer_and_close(status: int, message: str) -> JSONResponse:
    """An error in the form of the OpenAI API, after which the connection is closed."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": status}
    return JSONResponse({"error": error}, status_code=status, headers={"Connection": "close"})


class _Server(uvicorn.Server):
    """A server that installs no signal handlers and wakes the event loop once a second.

    Engines do not step while a timer is about to expire, which could be an agent's, and uvicorn's expires ten times a
    second.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ended = asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._ended.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), TICK_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serve_app(
    app: ASGIApp,
    *,
    has_key: bool,
    host: str = "127.0.0.1",
    port: int = 0,
    knob: str = "rollout.http_port",
    public_url: str | None = None,
) -> AsyncIterator[str]:
    """Serve an app on the running event loop and yield its URL; port 0 picks a free port. `knob` sets the port.

    `has_key`: whether the app asks for a key. `public_url`: under which it is reached too, such as that of a proxy.
    """
    with open_listener(host, port, knob=knob) as listener:
        config = build_config(
            app, listener, has_key=has_key, public_url=public_url, timeout_graceful_shutdown=SHUTDOWN_GRACE_S
        )
        server = _Server(config)
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            while not server.started:
                if task.done():
                    task.result()
                    raise RuntimeError(f"the server on {host}:{port} ended before it started")
                await asyncio.sleep(0.005)
            yield format_url(listener, host)
        finally:
            await end_server(server, task)


async def end_server(server: _Server, task: asyncio.Task[None]) -> None:
    """End the server, also if this is cancelled meanwhile: the listener may be closed only after the server has."""
    server.end()
    cancellation = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        raise cancellation


def run_app(
    app: ASGIApp, listener: socket.socket, *, has_key: bool, public_url: str | None = None, **settings: Any
) -> None:
    """Serve an app in this thread until it is interrupted; `settings` are uvicorn's."""
    config = build_config(app, listener, has_key=has_key, public_url=public_url, **settings)
    uvicorn.Server(config).run(sockets=[listener])


def build_config(
    app: ASGIApp, listener: socket.socket, *, has_key: bool, public_url: str | None = None, **settings: Any
) -> uvicorn.Config:
    """The configuration of a server of the app on the socket."""
    guarded = SocketGuard(app, address=listener.getsockname()[0], has_key=has_key, public_url=public_url)
    fixed: dict[str, Any] = {"log_level": "warning", "access_log": False, "proxy_headers": False, "ws": "none"}
    return uvicorn.Config(guarded, **fixed | {"lifespan": "off"} | settings)


def format_url(listener: socket.socket, host: str) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


@contextlib.contextmanager
def open_listener(host: str, port: int, *, knob: str) -> Iterator[socket.socket]:
    """A socket that listens at the address; ConfigError if that is not possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # the event loop turns Nagle's algorithm off only for sockets of this protocol; it would delay answers by 40 ms
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)  # clients that come before the server accepts wait
        except OSError as error:
            raise ConfigError(
                f"cannot serve on {host}:{port}: {error.strerror}; set {knob} to a free port, or to 0"
            ) from error
        yield listener


def check_port(port: int | None, *, host: str = "127.0.0.1", knob: str) -> None:
    """Raise ConfigError if a server could not listen there; None and 0 (any free port) need no check."""
    if port:
        with open_listener(host, port, knob=knob):
            pass
