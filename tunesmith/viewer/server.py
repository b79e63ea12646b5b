"""The viewer's web server: static files and answers as JSON, for this machine only.

Requests of other web pages are refused (`http_server`). Nothing is written, scripts come from this server alone, and
every answer is data.
"""

from __future__ import annotations

import mimetypes
import threading
import webbrowser
from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tunesmith.errors import TunesmithError
from tunesmith.http_server import format_url, open_listener, run_app
from tunesmith.viewer.answers.table import Answers, UnknownAnswerError
from tunesmith.viewer.bundle import STATIC, bundle_modules
from tunesmith.viewer.reading.run import Run

HOST = "127.0.0.1"
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

    routes = [
        Route("/api/{path:path}", get_answer, methods=["GET"]),
        Route("/bundle.js", get_bundle, methods=["GET"]),
        Mount("/", StaticFiles(directory=STATIC, html=True)),
    ]
    return SecurityHeaders(Starlette(routes=routes))


class SecurityHeaders:
    """Adds the security headers to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)


def serve(runs: Sequence[Run], *, port: int, has_browser: bool, announce: Callable[[str], None]) -> None:
    """Serve on this machine until interrupted; port 0 takes a free one."""
    with open_listener(HOST, port, knob="--port") as listener:
        url = f"{format_url(listener, HOST)}/"
        answers = Answers(runs)
        announce(url)
        # what the first page asks for is read while the browser starts
        threading.Thread(target=answers.preload, name="tunesmith-view-preload", daemon=True).start()
        if has_browser:
            threading.Timer(0.3, webbrowser.open, [url]).start()
        run_app(build_app(runs, answers=answers), listener, has_key=False)
