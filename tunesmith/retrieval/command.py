"""The commands `tunesmith search build` and `tunesmith search serve`."""

from __future__ import annotations

import os

from tunesmith.retrieval.index.build import build_index
from tunesmith.retrieval.server.process import serve_index
from tunesmith.retrieval.settings import IndexSettings, ServerSettings

API_KEY_VARIABLE = "TUNESMITH_SEARCH_API_KEY"


def build(settings: IndexSettings, *, corpus: str, out: str, name: str | None = None, split: str | None = None) -> str:
    """Build an index in the folder `out`."""
    info = build_index(corpus, out, settings, name=name, split=split)
    return f"{info.num_passages} passages, {info.settings.kind} index {info.index_hash}: {out}"


def serve(settings: ServerSettings, *, index: str) -> None:
    """Serve an index until the process is interrupted; the API key may come from the environment."""
    key = settings.api_key or os.environ.get(API_KEY_VARIABLE)
    serve_index(index, settings.model_copy(update={"api_key": key}), announce=announce)


def announce(line: str) -> None:
    """Print the line with the URL, which programs that start the server wait for."""
    print(line, flush=True)
