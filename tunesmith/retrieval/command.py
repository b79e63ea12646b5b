"""The commands `tunesmith search build` and `tunesmith search serve`."""

from __future__ import annotations

import os
import sys

from tunesmith.http_server import format_url, open_listener, run_app
from tunesmith.retrieval.index.search import SearchIndex, build_index
from tunesmith.retrieval.server import build_app
from tunesmith.retrieval.settings import IndexSettings, ServerSettings

API_KEY_VARIABLE = "TUNESMITH_SEARCH_API_KEY"


def build(settings: IndexSettings, *, corpus: str, out: str, name: str | None = None, split: str | None = None) -> str:
    """Build an index in the folder `out`."""
    info = build_index(corpus, out, settings, name=name, split=split)
    return f"{info.num_passages} passages, {info.settings.kind} index {info.index_hash}: {out}"


SWITCH_INTERVAL_S = 0.0005
"""How long a search may keep the event loop from the interpreter; Python's default is ten times as long."""


def serve(settings: ServerSettings, *, index: str) -> None:
    """Serve an index until the process is interrupted; the API key may come from the environment."""
    settings = settings.model_copy(update={"api_key": settings.api_key or os.environ.get(API_KEY_VARIABLE)})
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    opened = SearchIndex(index, device=settings.device)
    with open_listener(settings.host, settings.port, knob="port") as listener:
        info, url = opened.info, format_url(listener, settings.host)
        # programs that start the server wait for this line
        print(
            f"serving {info.num_passages} passages ({info.settings.kind}, index {info.index_hash}) on {url}", flush=True
        )
        app, has_key = build_app(opened, settings), settings.api_key is not None
        run_app(app, listener, has_key=has_key, public_url=url, lifespan="on")
