"""Command lines that do not parse: what the user most likely meant, in one sentence that can be copied.

`name_corrections` gives every command of an app these checks. Errors without a likely meaning stay typer's.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

OVERRIDE = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*=.*", re.DOTALL)
"""KEY=VALUE."""
DOTTED_OPTION = re.compile(r"--?([A-Za-z_][\w-]*(?:\.[\w-]+)+)(?:=(.*))?", re.DOTALL)
"""A key of a file written as an option: --algorithm.group_size, with =VALUE or without."""


class CorrectedCommand(TyperCommand):
    """A command that says how an override, or a second value of an option, is written."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        if find_option(self, "--set") is not None:
            for place, word in enumerate(given):
                check_dotted_option(word, given[place + 1 :])
        ctx.allow_extra_args = True  # they are refused here
        extra = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            if extra:
                refuse_extra(self, ctx, given, extra)
            check_misplaced(self, list_positional(self, ctx))
        return extra


class CorrectedGroup(TyperGroup):
    """A group of commands that says where the command belongs, and which commands there are."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        place = next((place for place, word in enumerate(args) if word in self.commands), None)
        first = args[0] if args else ""
        if place and first.startswith("-") and first not in ctx.help_option_names:
            words = f"{ctx.command_path} {shlex.join([*args[place:], *args[:place]])}"
            fail(f"options follow the command: write {words}")
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in self.commands and not name.startswith("-"):
            if Path(name).suffix in (".yaml", ".yml") and "tune" in self.commands:
                words = f"{ctx.command_path} tune {shlex.join(args)}"
                fail(f"{name!r} is not a command: to train as the file says, write {words}")
            near = get_close_matches(name, list(self.commands), n=1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            fail(f"there is no command {name!r}: {meant}{ctx.command_path} has {', '.join(self.commands)}")
        return super().resolve_command(ctx, args)


def name_corrections(*apps: typer.Typer) -> None:
    """Let all commands of the apps, and the apps themselves, name the likely meaning of a wrong command line."""
    for app in apps:
        app.info.cls = CorrectedGroup
        for command in app.registered_commands:
            command.cls = CorrectedCommand


def check_dotted_option(word: str, following: Sequence[str]) -> None:
    """Refuse a key of the file that is written as an option."""
    found = DOTTED_OPTION.fullmatch(word)
    if found is None:
        return
    key, value = found.groups()
    if value is None:
        value = following[0] if following and not following[0].startswith("--") else "VALUE"
    fail(f"{key} is a key of the file, not an option: write --set {shlex.quote(f'{key}={value}')}")


def refuse_extra(command: TyperCommand, ctx: Any, given: Sequence[str], extra: Sequence[str]) -> NoReturn:
    """Say what to write for arguments that the command does not take."""
    keyless = [value for value in ctx.params.get("overrides") or [] if "=" not in value]
    if keyless:
        fail(f"--set takes KEY=VALUE without a space: write --set {shlex.quote(f'{keyless[0]}={extra[0]}')}")
    repeated = find_repeated(command, given, extra[0])
    if repeated is not None and repeated != "--set":
        fail(f"{repeated} takes one value and may be repeated: write {repeated} {shlex.quote(extra[0])}")
    check_misplaced(command, [*extra, *list_positional(command, ctx)])
    names = " ".join(str(each.name).upper() for each in command.params if each.param_type_name == "argument")
    path = ctx.command_path
    fail(f"unexpected argument {extra[0]!r}: {path} takes {names or 'no argument'} and options, see {path} --help")


def check_misplaced(command: TyperCommand, words: Sequence[str]) -> None:
    """Refuse KEY=VALUE where a file is expected, if the command takes overrides and there is no such file."""
    overrides = [f"--set {shlex.quote(word)}" for word in words if OVERRIDE.fullmatch(word) and not Path(word).exists()]
    if overrides and find_option(command, "--set") is not None:
        fail(f"a key of the file is changed with --set: write {' '.join(overrides)}")


def list_positional(command: TyperCommand, ctx: Any) -> list[str]:
    """The values of the command's arguments; each takes at most one."""
    values = [ctx.params[each.name] for each in command.params if each.param_type_name == "argument"]
    return [value for value in values if isinstance(value, str)]


def find_option(command: TyperCommand, name: str) -> Any:
    return next((each for each in command.params if name in each.opts), None)


def find_repeated(command: TyperCommand, given: Sequence[str], word: str) -> str | None:
    """The repeatable option that has the value before `word`, as in `--format gguf hf`."""
    place = given.index(word)
    option = find_option(command, given[place - 2]) if place >= 2 else None
    return given[place - 2] if option is not None and option.multiple else None


def fail(sentence: str) -> NoReturn:
    """Print the sentence, and end with the status of wrong command lines."""
    typer.echo(f"tunesmith: {sentence}", err=True)
    raise typer.Exit(2)
