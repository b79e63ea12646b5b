"""The command `tunesmith serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from tunesmith.pipeline.session.process import run_guarded


def serve(
    config: Annotated[str, typer.Argument(help="Run file (YAML). List its keys with: tunesmith config --options.")],
    judge: Annotated[
        str | None,
        typer.Option(help="Judge, as module:function or file.py:function; without one, workers post rewards."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file, e.g. serve.port=0. Repeatable."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint of this run.")] = False,
    gpus: Annotated[int | None, typer.Option(min=1, help="Train on this many GPUs of this host.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Train on this many processes, also on CPUs.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Print tracebacks of errors and of failed rollouts.")] = False,
) -> None:
    """Train on what programs outside of this process do: they take tasks over HTTP, call the model, post rewards."""

    def work() -> None:
        from tunesmith import run_files

        chosen = run_files.collect_overrides(overrides, workflow=None, judge=judge)
        chosen += run_files.collect_resuming(resume=resume, step=None)
        chosen += run_files.collect_ranks(gpus=gpus, ranks=ranks)
        settings = run_files.load_run_file(config, chosen)
        run_files.check_and_announce("serve", settings, f"{config} is valid, loading libraries")
        if run_files.is_launcher(settings):
            from tunesmith.pipeline.session.launch import launch_tuning

            launch_tuning(settings, config, chosen, has_gpus=gpus is not None, is_debug=debug, command="serve")
            return
        from tunesmith import api

        result = api.serve(settings)
        if not run_files.is_first_rank():
            return
        typer.echo(f"run folder: {result.folder}")
        if result.checkpoint is not None:
            typer.echo(f"{'trained' if result.has_learned else 'unchanged'} model: {result.checkpoint}")

    run_guarded(work, is_debug=debug)
