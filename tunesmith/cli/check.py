"""The command `tunesmith check`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from tunesmith.errors import ConfigError
from tunesmith.runs.process import run_guarded


def check(
    target: Annotated[
        str,
        typer.Argument(help="Workflow: file.py (its `workflow`), file.py:function, module:function; or a run file."),
    ],
    task: Annotated[str, typer.Option(help="Row of the data set, from 0, or the task itself as a JSON object.")] = "0",
    model: Annotated[str | None, typer.Option(help="Model: folder or hub id. Overrides the file.")] = None,
    judge: Annotated[str | None, typer.Option(help="Judge, as file.py:function. Overrides the file.")] = None,
    data: Annotated[str | None, typer.Option(help="Data set of the task: folder, file or hub id.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of a run file. Repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print tracebacks of errors.")] = False,
) -> None:
    """Run a workflow on one task and show its tokens, masks, reward and problems."""

    def work() -> None:
        row = read_task(task)
        from tunesmith.api.workflow_check import check as check_workflow  # torch, which --help does not need

        result = check_workflow(target, task=row, model=model, judge=judge, data=data, overrides=overrides or [])
        typer.echo(json.dumps(result.to_json(), indent=1) if as_json else result)

    run_guarded(work, is_debug=debug)


def read_task(text: str) -> int | dict[str, Any]:
    """The value of `--task`."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, dict) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ConfigError(f"--task={text!r} must be the number of a row, or the task as a JSON object")
