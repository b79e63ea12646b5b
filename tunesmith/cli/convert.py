"""`tunesmith convert`: files of ET-Agent's code to rows of tasks or transcripts, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tunesmith.runs.process import run_guarded

FORMAT_HELP = (
    "et_pool, et_evolve, et_rft, et_rollouts, et_pareto, et_rl, et_test (files of ET-Agent's code), tasks, "
    "transcripts or conversations (JSON lines of Tunesmith)."
)


def convert(
    path: Annotated[str, typer.Argument(help="File to read.")],
    source: Annotated[str, typer.Option("--from", metavar="FORMAT", help=f"Format of the file: {FORMAT_HELP}")],
    target: Annotated[str, typer.Option("--to", metavar="FORMAT", help="Format to write, one of the same.")],
    out: Annotated[str, typer.Option(help="File to write; an existing file is an error.")],
    debug: Annotated[bool, typer.Option("--debug", help="Print tracebacks of errors.")] = False,
) -> None:
    """Convert files of ET-Agent's code to rows of tasks, transcripts or conversations, and back."""

    def work() -> None:
        from tunesmith.et_agent.formats.conversion import convert_file

        result = convert_file(path, source=source, target=target, out=Path(out))
        typer.echo(f"{result.path}: {result.num_rows} rows of {target}")
        for failure, count in result.format_errors.items():
            typer.echo(f"  {count} transcripts with a format error: {failure}")

    run_guarded(work, is_debug=debug)
