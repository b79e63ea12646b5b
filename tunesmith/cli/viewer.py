"""The commands `tunesmith view` and `tunesmith show`."""

from __future__ import annotations

from typing import Annotated

import typer

from tunesmith.runs.process import run_guarded

DEFAULT_PORT = 7860
Debug = Annotated[bool, typer.Option("--debug", help="Print tracebacks of errors.")]


def view(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="Folders of runs, finished or running, of `tunesmith eval`, or above such folders."
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")] = DEFAULT_PORT,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
    export: Annotated[
        str | None, typer.Option(metavar="FILE.html", help="Write one self-contained file instead of serving.")
    ] = None,
    max_mb: Annotated[float, typer.Option(min=1, help="Largest size of that file; it says what it leaves out.")] = 20.0,
    debug: Debug = False,
) -> None:
    """Show runs in a local web page: curves, rollouts, tokens, failures and evaluations, side by side."""

    def work() -> None:
        from tunesmith.viewer.reading.run import open_runs  # numpy and pyarrow, which --help does not need

        opened = open_runs(runs)
        if export is not None:
            from tunesmith.viewer.export import export_report

            typer.echo(export_report(opened, export, max_bytes=int(max_mb * 2**20)))
            return
        from tunesmith.viewer.server import serve

        names = ", ".join(run.name for run in opened)
        serve(
            opened,
            port=port,
            has_browser=not no_browser,
            announce=lambda url: typer.echo(f"{names}: {url} (Ctrl-C ends it)"),
        )

    run_guarded(work, is_debug=debug)


def show(
    run: Annotated[str, typer.Argument(help="Folder of a run, or above one.")],
    step: Annotated[int | None, typer.Option(min=0, help="Step to show; default: the newest with rollouts.")] = None,
    task: Annotated[str | None, typer.Option(help="Only tasks whose id contains this.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only rollouts with at least this reward.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Only rollouts with at most this reward.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only failed rollouts, with their tracebacks.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Largest number of rollouts to print.")] = 10,
    debug: Debug = False,
) -> None:
    """Print rollouts of a step: conversations, rewards, and failures with their tracebacks."""

    def work() -> None:
        from tunesmith.viewer.reading.run import open_runs  # numpy and pyarrow, which --help does not need
        from tunesmith.viewer.show import Wanted, choose_run, print_step

        wanted = Wanted(task=task, min_reward=min_reward, max_reward=max_reward, is_failed=failed, limit=limit)
        print_step(choose_run(open_runs([run])), step, wanted)

    run_guarded(work, is_debug=debug)
