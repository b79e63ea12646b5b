"""The `tunesmith` command: what the table of commands (`tunesmith.commands.table`) describes, as a command line.

Each command reads and validates its settings with light modules, prints its first line, and only then imports the
libraries it needs. Importing torch takes seconds; `--help` and errors in a config file do not wait for it.

Errors go to stderr as one sentence and end the command with a non-zero exit status; `--debug` adds the traceback.
`--help` lists the commands in the order of the table.
"""

from __future__ import annotations

import inspect
import json
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from tunesmith.cli.usage import name_corrections
from tunesmith.cluster.rank_info import find_rank_info, watch_launcher
from tunesmith.commands.table import COMMANDS, DEBUG, GROUPS, REQUIRED, Command, Option, import_named
from tunesmith.runs.process import exit_despite_threads, run_guarded
from tunesmith.storage import clean_terminal


def build_app() -> typer.Typer:
    """The commands of the table, those of groups in apps of their own."""
    app = typer.Typer(
        name="tunesmith",
        help="Train the model inside any LLM agent with reinforcement learning.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    groups = {name: typer.Typer(name=name, help=text, no_args_is_help=True) for name, text in GROUPS.items()}
    for group in groups.values():
        app.add_typer(group)
    for command in COMMANDS:
        if command.run is not None:
            name_of_group, _, name = command.name.rpartition(" ")
            owner = groups[name_of_group] if name_of_group else app
            owner.command(name)(build_function(command))
    name_corrections(app, *groups.values())
    return app


def build_function(command: Command) -> Callable[..., None]:
    """The function of a command as typer reads it: a parameter for each option."""

    def call(**given: Any) -> None:
        is_debug = given.pop("debug", False)
        run_guarded(lambda: run_command(command, given, is_debug=is_debug), is_debug=is_debug)

    parameters = [build_parameter(option) for option in (*command.options, DEBUG)]
    call.__doc__ = command.help
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    return call


def build_parameter(option: Option) -> inspect.Parameter:
    limits = {"min": option.minimum, "max": option.maximum, "metavar": option.metavar}
    details: dict[str, Any] = {"help": option.help} | {key: each for key, each in limits.items() if each is not None}
    flag = option.flag or f"--{option.name.replace('_', '-')}"
    kind: Any = list[str] if option.type is list else option.type
    default = option.default
    if option.type is bool:
        default = False
    elif default is None:
        kind = kind | None
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is REQUIRED else default,
        annotation=Annotated[kind, typer.Argument(**details) if option.is_argument else typer.Option(flag, **details)],
    )


def run_command(command: Command, given: Mapping[str, Any], *, is_debug: bool) -> None:
    """Load and check the settings of a command, print its first line, do its work, and print the result."""
    options = {option.name: option for option in command.options}
    arguments = {name: read_option(options[name], each) for name, each in given.items() if is_given(each)}
    is_quiet = any(options[name].is_quiet for name in arguments)
    is_json = arguments.pop("as_json", False)
    if command.config is None:
        if command.first_line is not None:
            print(f"{command.name}: {command.first_line.format(**arguments)}", file=sys.stderr, flush=True)
        result = import_named(str(command.run))(**arguments)
        show_result(json.dumps(result.to_json(), indent=1) if is_json else result)
        return
    # pydantic and OmegaConf, which --help does not need
    from tunesmith.commands import settings as files

    path = arguments.pop("config", None)
    gpus, ranks = arguments.get("gpus"), arguments.get("ranks")
    if gpus is not None and ranks is not None:
        raise ValueError(f"--gpus {gpus} and --ranks {ranks}: give only one of them; --gpus starts a rank on each GPU")
    changes = [*arguments.pop("overrides", []), *collect_changes(options, arguments)]
    arguments = {name: each for name, each in arguments.items() if options[name].key is None}
    settings = files.load_settings(command, path, changes)
    if gpus is not None and settings.cluster.launcher == "ray":
        raise ValueError(f"--gpus {gpus} counts GPUs of this host: with cluster.launcher=ray use --ranks {gpus}")
    if command.has_ranks:
        watch_launcher()
    plan = None
    if command.plan is not None:
        plan = import_named(command.plan)(settings, **arguments)
    else:
        files.check_paths(settings, has_models=command.finds_models)
    if command.first_line is not None and not is_quiet:
        files.announce(
            command.name, settings, command.first_line.format(config=path, settings=settings, plan=plan, **arguments)
        )
    is_single = command.has_ranks and find_rank_info().world_size == 1
    if is_single and settings.cluster.launcher == "torchrun" and (settings.cluster.num_workers or 1) > 1:
        import_named("tunesmith.runs.launch:launch_tuning")(
            settings, path, changes, has_gpus=gpus is not None, is_debug=is_debug, command=command.name
        )
        return
    result = import_named(str(command.run))(settings, **arguments)
    if not command.has_ranks or find_rank_info().is_first:
        show_result(result)


def show_result(result: Any) -> None:
    if result is not None:
        typer.echo(clean_terminal(str(result)))


def is_given(value: Any) -> bool:
    """Whether an option was given, or has a default."""
    return value is not None and value is not False and value != []


def read_option(option: Option, value: Any) -> Any:
    return value if option.read is None else import_named(option.read)(value)


def collect_changes(options: Mapping[str, Option], given: Mapping[str, Any]) -> list[str]:
    """The overrides that options with a key stand for."""
    changes: list[str] = []
    for name, value in given.items():
        if (key := options[name].key) is not None:
            changes += [f"{key}={format_value(value)}", *options[name].also]
    return changes


def format_value(value: Any) -> str:
    """A value as it is written in an override; text is quoted, so that `--name 7` stays text, except null."""
    return "null" if value == "null" else json.dumps(value, ensure_ascii=False)


app = build_app()


def main() -> None:
    # Import workflows given as module:function from the current folder, as python -m does.
    sys.path.insert(0, "")
    try:
        app()
    except SystemExit as ending:
        exit_despite_threads(ending)
        raise
    except KeyboardInterrupt:  # while the command line was parsed
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
