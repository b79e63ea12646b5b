"""The viewer's web server: static files and answers as JSON, for this machine only.

Requests of other web pages are refused (`http_server`). Nothing is written but the notes that a user saves, scripts
come from this server alone, and every answer is data.
"""

from __future__ import annotations

import json
import mimetypes
import threading
import webbrowser
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from tunesmith.errors import TunesmithError
from tunesmith.http_server import BodyTooLargeError, format_url, open_listener, read_body, run_app
from tunesmith.viewer.answers.table import Answers, UnknownAnswerError
from tunesmith.viewer.bundle import STATIC, bundle_modules

HOST = "127.0.0.1"
MAX_NOTES_BYTES = 2**16
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


def build_app(answers: Answers) -> ASGIApp:
    """The ASGI application that shows the runs."""

    async def get_answer(request: Request) -> Response:
        path, params = request.path_params["path"], dict(request.query_params)
        return await respond(answers.get_json, path, params)

    async def put_notes(request: Request) -> Response:
        try:
            given = json.loads(await read_body(request.scope, request.receive, MAX_NOTES_BYTES))
        except (ValueError, BodyTooLargeError):
            return Response(f"notes must be JSON of at most {MAX_NOTES_BYTES} bytes", status_code=400)
        return await respond(answers.save_notes, request.path_params["number"], given)

    bundle = Response(bundle_modules(), media_type="text/javascript")
    routes = [
        Route("/api/notes/{number:int}", put_notes, methods=["PUT"]),
        Route("/api/{path:path}", get_answer, methods=["GET"]),
        Route("/bundle.js", lambda request: bundle, methods=["GET"]),
        Mount("/", StaticFiles(directory=STATIC, html=True)),
    ]
    return Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=add_security_headers)])


async def add_security_headers(request: Request, call_next: RequestResponseEndpoint) -> Response:
    response = await call_next(request)
    response.headers.update(SECURITY_HEADERS)
    return response


async def respond(function: Callable[..., bytes], *args: Any) -> Response:
    """The JSON that a function returns, or its error as text."""
    try:
        return Response(await run_in_threadpool(function, *args), media_type="application/json")
    except UnknownAnswerError as error:
        return Response(str(error), status_code=404, media_type="text/plain")
    except (TunesmithError, ValueError, KeyError, OSError) as error:
        return Response(f"{error}", status_code=400, media_type="text/plain")


def serve(answers: Answers, *, port: int, has_browser: bool, announce: Callable[[str], None]) -> None:
    """Serve on this machine until interrupted; port 0 takes a free one."""
    with open_listener(HOST, port, knob="--port") as listener:
        url = f"{format_url(listener, HOST)}/"
        announce(url)
        # what the first page asks for is read while the browser starts
        threading.Thread(target=answers.preload, name="tunesmith-view-preload", daemon=True).start()
        if has_browser:
            threading.Timer(0.3, webbrowser.open, [url]).start()
        run_app(build_app(answers), listener, has_key=False)
