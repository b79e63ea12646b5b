"""The command `tunesmith model prepare`."""

from __future__ import annotations

from typing import Annotated

import typer

from tunesmith.cli.options import Debug
from tunesmith.runs.process import run_guarded


def prepare_model(
    name: Annotated[str, typer.Argument(help="Model: smollm2-135m-instruct, pocket or pocket-gguf.")],
    out: Annotated[str | None, typer.Option(help="Output folder; default: models/NAME.")] = None,
    debug: Debug = False,
) -> None:
    """Write a Hugging Face model folder without the hub: from an installed package, or with random weights."""

    def work() -> None:
        from tunesmith.model.prepare import prepare_model as prepare

        typer.echo(prepare(name, out or f"models/{name}"))

    run_guarded(work, is_debug=debug)
