"""Start a run of `tunesmith tune` or `tunesmith serve`, and print where its model is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import typer

from tunesmith import run_files
from tunesmith.cluster.rank_errors import watch_launcher
from tunesmith.config import RunConfig


def start_run(
    command: Literal["tune", "serve"], settings: RunConfig, config: str, overrides: Sequence[str], *, has_gpus: bool,
    is_debug: bool,
) -> None:  # fmt: skip
    """Run in this process, or launch the ranks, which run the command again with the same `config` and overrides."""
    watch_launcher()
    run_files.check_and_announce(command, settings, f"{config} is valid, loading libraries")
    if run_files.is_launcher(settings):
        from tunesmith.runs.launch import launch_tuning

        launch_tuning(settings, config, overrides, has_gpus=has_gpus, is_debug=is_debug, command=command)
        return
    from tunesmith import api

    result = api.tune(settings) if command == "tune" else api.serve(settings)
    if not run_files.is_first_rank():
        return
    typer.echo(f"run folder: {result.folder}")
    if result.checkpoint is not None:
        typer.echo(f"{'trained' if result.has_learned else 'unchanged'} model: {result.checkpoint}")
    if result.best_checkpoint is not None:
        typer.echo(f"best model: {result.best_checkpoint}")
