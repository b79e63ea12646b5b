"""The command `tunesmith serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from tunesmith.cli.options import ConfigPath, Debug, Gpus, NumRanks, Resume
from tunesmith.runs.process import run_guarded


def serve(
    config: ConfigPath,
    judge: Annotated[
        str | None,
        typer.Option(help="Judge, as module:function or file.py:function; without one, workers post rewards."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file, e.g. serve.port=0. Repeatable."),
    ] = None,
    resume: Resume = False,
    gpus: Gpus = None,
    ranks: NumRanks = None,
    debug: Debug = False,
) -> None:
    """Train agents that run as programs of their own: they take tasks over HTTP, call the model and post rewards."""

    def work() -> None:
        from tunesmith import run_files
        from tunesmith.cli.training import start_run

        chosen = run_files.collect_overrides(overrides, workflow=None, judge=judge)
        chosen += run_files.collect_resuming(resume=resume, step=None)
        chosen += run_files.collect_ranks(gpus=gpus, ranks=ranks)
        settings = run_files.load_run_file(config, chosen)
        start_run("serve", settings, config, chosen, has_gpus=gpus is not None, is_debug=debug)

    run_guarded(work, is_debug=debug)
