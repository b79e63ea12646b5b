"""Runs the server in this process until it is interrupted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tunesmith.http_server import format_url, open_listener, run_app
from tunesmith.retrieval.index.search import SearchIndex
from tunesmith.retrieval.server.app import build_app
from tunesmith.retrieval.settings import ServerSettings

SWITCH_INTERVAL_S = 0.0005
"""How long a search may keep the event loop from the interpreter; Python's default is ten times as long."""


def serve_index(folder: str | Path, settings: ServerSettings, *, announce: Callable[[str], None]) -> None:
    """Open an index and serve it; `announce` receives a line with the URL once requests are accepted."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    index = SearchIndex(folder, device=settings.device)
    with open_listener(settings.host, settings.port, knob="port") as listener:
        info, url = index.info, format_url(listener, settings.host)
        announce(f"serving {info.num_passages} passages ({info.settings.kind}, index {info.index_hash}) on {url}")
        app, has_key = build_app(index, settings), settings.api_key is not None
        run_app(app, listener, has_key=has_key, public_url=url, lifespan="on")
