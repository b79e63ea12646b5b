"""Serves the endpoint over HTTP, for agents in other processes and languages."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp

from tunesmith.errors import ConfigError

SHUTDOWN_GRACE_S = 2
TICK_S = 1.0


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
    app: ASGIApp, *, host: str = "127.0.0.1", port: int = 0, knob: str = "rollout.http_port"
) -> AsyncIterator[str]:
    """Serve an app on the running event loop and yield its URL; port 0 picks a free port. `knob` sets the port."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        lifespan="off",
        access_log=False,
        proxy_headers=False,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
    )
    with open_listener(host, port, knob=knob) as listener:
        listener.listen(2048)
        server = _Server(config)
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            while not server.started:
                if task.done():
                    task.result()
                    raise RuntimeError(f"the server on {host}:{port} ended before it started")
                await asyncio.sleep(0.005)
            url_host = f"[{host}]" if ":" in host else host
            yield f"http://{url_host}:{listener.getsockname()[1]}"
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


@contextlib.contextmanager
def open_listener(host: str, port: int, *, knob: str) -> Iterator[socket.socket]:
    """A socket bound to the address; ConfigError if that is not possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # the event loop turns Nagle's algorithm off only for sockets of this protocol; it would delay answers by 40 ms
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot serve on {host}:{port}: {error.strerror}; set {knob} to a free port, or to 0"
            ) from error
        yield listener


def check_port(port: int | None, *, host: str = "127.0.0.1", knob: str) -> None:
    """Raise ConfigError if a server could not listen there; None and 0 (any free port) need no check."""
    if port:
        with open_listener(host, port, knob=knob) as listener:
            listener.listen()
