"""Runs the server in this process until it is interrupted."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path

import uvicorn

from tunesmith.errors import ConfigError
from tunesmith.retrieval.index.search import SearchIndex
from tunesmith.retrieval.server.app import build_app
from tunesmith.retrieval.settings import ServerSettings

BACKLOG = 2048
SWITCH_INTERVAL_S = 0.0005
"""How long a search may keep the event loop from the interpreter; Python's default is ten times as long."""


def serve_index(folder: str | Path, settings: ServerSettings, *, announce: Callable[[str], None]) -> None:
    """Open an index and serve it; `announce` receives a line with the URL once requests are accepted."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    index = SearchIndex(folder, device=settings.device)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # the event loop turns Nagle's algorithm off only for sockets of this protocol; it would delay answers by 40 ms
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except OSError as error:
            raise ConfigError(
                f"cannot serve on {settings.host}:{settings.port}: {error.strerror}; choose a free --port, or 0"
            ) from error
        listener.listen(BACKLOG)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        info = index.info
        announce(
            f"serving {info.num_passages} passages ({info.settings.kind}, index {info.index_hash}) on "
            f"http://{host}:{listener.getsockname()[1]}"
        )
        config = uvicorn.Config(build_app(index, settings), log_level="warning", access_log=False)
        uvicorn.Server(config).run(sockets=[listener])
