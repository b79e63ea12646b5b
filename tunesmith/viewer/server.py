"""The viewer's web server: static files and answers as JSON, for this machine only.

Requests whose Host is not this machine are refused, so that no web page can reach the server through a DNS name of its
own. Nothing is written, scripts come from this server alone, and every answer is data.
"""

from __future__ import annotations

import mimetypes
import socket
import threading
import webbrowser
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tunesmith.errors import TunesmithError
from tunesmith.viewer.answers.table import Answers, UnknownAnswerError
from tunesmith.viewer.bundle import STATIC, bundle_modules
from tunesmith.viewer.reading.run import Run

HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
mimetypes.add_type("text/javascript", ".js")


def build_app(runs: Sequence[Run], *, answers: Answers | None = None) -> ASGIApp:
    """The ASGI application that shows the runs."""
    answers = answers or Answers(runs)

    async def get_answer(request: Request) -> Response:
        path, params = request.path_params["path"], dict(request.query_params)
        try:
            body, status = await run_in_threadpool(answers.get_json, path, params), 200
        except UnknownAnswerError as error:
            return Response(str(error), status_code=404, media_type="text/plain")
        except (TunesmithError, ValueError, KeyError, OSError) as error:
            return Response(f"{error}", status_code=400, media_type="text/plain")
        return Response(body, status_code=status, media_type="application/json")

    bundle = bundle_modules()

    async def get_bundle(request: Request) -> Response:
        return Response(bundle, media_type="text/javascript")

    async def get_file(request: Request) -> Response:
        path = (STATIC / (request.path_params.get("path") or "index.html")).resolve()
        if not path.is_relative_to(STATIC.resolve()) or not path.is_file():
            return Response("there is no such file", status_code=404, media_type="text/plain")
        return FileResponse(path)

    routes = [
        Route("/", get_file, methods=["GET"]),
        Route("/api/{path:path}", get_answer, methods=["GET"]),
        Route("/bundle.js", get_bundle, methods=["GET"]),
        Route("/{path:path}", get_file, methods=["GET"]),
    ]
    return LocalOnly(Starlette(routes=routes))


class LocalOnly:
    """Refuses requests with a foreign Host and adds the security headers to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        app = self._app if is_local(host) else Response(f"host {host!r} is not this machine", status_code=403)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message["headers"])
                added = [(name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
                message = {**message, "headers": [*headers, *added]}
            await send(message)

        await app(scope, receive, send_with_headers)


def is_local(host: str) -> bool:
    """Whether a Host header names this machine, with any port."""
    try:
        return urlsplit(f"//{host}").hostname in HOSTS
    except ValueError:
        return False


def serve(runs: Sequence[Run], *, port: int, has_browser: bool, announce: Callable[[str], None]) -> None:
    """Serve on 127.0.0.1 until interrupted; port 0 takes a free one."""
    listener = open_socket(port)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    answers = Answers(runs)
    announce(url)
    # what the first page asks for is read while the browser starts
    threading.Thread(target=answers.preload, name="tunesmith-view-preload", daemon=True).start()
    if has_browser:
        threading.Timer(0.3, webbrowser.open, [url]).start()
    config = uvicorn.Config(build_app(runs, answers=answers), log_level="warning", access_log=False, lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])


def open_socket(port: int) -> socket.socket:
    """A listening socket on 127.0.0.1."""
    # the event loop turns Nagle's algorithm off only for sockets of this protocol; it would delay answers by 40 ms
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(128)  # a browser that comes before the server accepts waits
    except OSError as error:
        listener.close()
        raise OSError(
            f"cannot listen on 127.0.0.1:{port} ({error.strerror}); choose another --port, 0 for a free one"
        ) from error
    return listener
