"""The commands `tunesmith search build` and `tunesmith search serve`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from tunesmith.runs.process import run_guarded

API_KEY_VARIABLE = "TUNESMITH_SEARCH_API_KEY"

search_app = typer.Typer(name="search", help="Search over passages, for agents.", no_args_is_help=True)
Debug = Annotated[bool, typer.Option("--debug", help="Print tracebacks of errors.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Another knob of docs/retrieval.md, e.g. --set key=3. Repeatable."),
]


@search_app.command("build")
def build(
    corpus: Annotated[
        str, typer.Argument(help="Passages: JSON Lines file, folder of text files, or Hugging Face data set.")
    ],
    out: Annotated[str, typer.Option(help="New folder for the index.")],
    kind: Annotated[str | None, typer.Option(help="bm25 (default), dense, or hybrid.")] = None,
    model: Annotated[str | None, typer.Option(help="Embedding model of dense and hybrid: folder or hub id.")] = None,
    chunk_words: Annotated[int | None, typer.Option(help="Split texts into passages of this many words.")] = None,
    name: Annotated[str | None, typer.Option(help="Configuration of a Hugging Face data set.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of a Hugging Face data set; train by default.")] = None,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Build a search index over passages: BM25, dense vectors, or both."""

    def work() -> None:
        from tunesmith.retrieval.index.build import build_index  # numpy, which --help does not need
        from tunesmith.retrieval.settings import IndexSettings
        from tunesmith.runs.load_config import load_section

        given = {"kind": kind, "model": model, "chunk_words": chunk_words}
        settings = load_section(IndexSettings, None, overrides or [], values=drop_unset(given))
        print(f"search build: reading {corpus}", file=sys.stderr, flush=True)
        info = build_index(corpus, out, settings, name=name, split=split)
        typer.echo(f"{info.num_passages} passages, {info.settings.kind} index {info.index_hash}: {out}")

    run_guarded(work, is_debug=debug)


@search_app.command("serve")
def serve(
    index: Annotated[str, typer.Argument(help="Folder of an index.")],
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 by default.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 1243 by default, 0 picks a free one.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help=f"Key that requests must carry; better set {API_KEY_VARIABLE}.")
    ] = None,
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Serve an index over HTTP until it is interrupted: /health, /search, /batch_search."""

    def work() -> None:
        from tunesmith.retrieval.server.process import serve_index  # numpy and starlette, which --help does not need
        from tunesmith.retrieval.settings import ServerSettings
        from tunesmith.runs.load_config import load_section

        key = api_key or os.environ.get(API_KEY_VARIABLE)
        given = {"host": host, "port": port, "api_key": key}
        settings = load_section(ServerSettings, None, overrides or [], values=drop_unset(given))
        serve_index(index, settings, announce=announce)

    run_guarded(work, is_debug=debug)


def announce(line: str) -> None:
    """Print the line with the URL, which programs that start the server wait for."""
    print(line, flush=True)


def drop_unset(given: dict[str, str | int | None]) -> dict[str, str | int]:
    return {key: value for key, value in given.items() if value is not None}
