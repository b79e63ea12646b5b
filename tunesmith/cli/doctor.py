"""The command `tunesmith doctor`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tunesmith.runs.process import run_guarded


def doctor(
    run: Annotated[str, typer.Argument(help="Folder of a run: finished, stopped or running.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print tracebacks of errors.")] = False,
) -> None:
    """Say what is wrong with a run and what to change, from the files in its folder."""

    def work() -> None:
        from tunesmith.commands.doctor.diagnose import diagnose  # numpy and pyarrow, which --help does not need

        diagnosis = diagnose(run)
        typer.echo(json.dumps(diagnosis.to_json(), indent=1) if as_json else diagnosis)

    run_guarded(work, is_debug=debug)
