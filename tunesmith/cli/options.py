"""Arguments and options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

ConfigPath = Annotated[str, typer.Argument(help="Run file (YAML). List its keys with: tunesmith config --options.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key of the file, e.g. --set section.key=3. Repeatable."
    ),
]
Workflow = Annotated[
    str | None, typer.Option(help="Workflow (the agent), as module:function or file.py:function. Overrides the file.")
]
Judge = Annotated[
    str | None, typer.Option(help="Judge, in the same form. Without a judge the workflow returns the reward.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint of this run.")]
Gpus = Annotated[int | None, typer.Option(min=1, help="Train on this many GPUs of this host.")]
NumRanks = Annotated[int | None, typer.Option("--ranks", min=1, help="Train on this many processes, also on CPUs.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print tracebacks of errors and of failed rollouts.")]
