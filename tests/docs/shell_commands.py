"""Checks shell lines of the documentation against the command line, the Makefile, the scripts and the extras.

Nothing is executed: a line is parsed as its command would parse it, so a renamed command, option or script is an error.
Lines may use the notation of help texts (`[--resume]`, `a | b`, `...`, `STEP`, `<time>`) and end in an explanation
after two spaces.
"""

from __future__ import annotations

import functools
import re
import shlex
import tomllib
from collections.abc import Iterator
from typing import Any

import typer.main
from markdown_pages import ROOT

from tunesmith.cli import app

COMMANDS = {"tunesmith", "make", "python", "python3", "pip"}
"""First words that make a block without a language a block of shell lines."""
PLAIN = {
    "cd",
    "export",
    "mkdir",
    "ls",
    "cat",
    "cp",
    "curl",
    "git",
    "tensorboard",
    "head",
    "ruff",
    "mypy",
    "node",
    "npm",
}
"""Commands of others, whose arguments are not checked."""
ASSIGNMENT = re.compile(r"[A-Z_][A-Z0-9_]*=")


def is_shell(text: str) -> bool:
    """Whether the first line of a block is a command that is known here."""
    words = [word for word in text.split() if not ASSIGNMENT.match(word)]
    return bool(words) and words[0] in COMMANDS


def find_errors(text: str) -> list[str]:
    """What is wrong with the commands of a block."""
    errors = []
    for line in iter_commands(text):
        error = check_line(line)
        if error is not None:
            errors.append(f"{line}: {error}")
    return errors


def iter_commands(text: str) -> Iterator[str]:
    """The commands of a block: continued lines joined, comments and explanations removed, heredocs left out."""
    end = None
    for line in text.replace("\\\n", " ").split("\n"):
        if end is not None:
            end = None if line.strip() == end else end
            continue
        heredoc = re.search(r"<<\s*'?(\w+)'?", line)
        if heredoc is not None:
            end = heredoc[1]
        line = re.sub(r"^\$ ", "", re.split(r"(?:^|\s)#", line)[0].strip())
        yield from (part for part in re.split(r"\s+(?:&&|;)\s+", line) if part)


def check_line(line: str) -> str | None:
    """An error in one command, or None."""
    line = re.split(r"(?<=\S) {2,}(?=[a-z])", line)[0] if re.match(r"(\S+=\S+ )*tunesmith ", line) else line
    plain = re.sub(r"<[\w /.-]+>|\b[A-Z]{2,}\b(?!=)", "1", line)
    words = [word for word in split_words(plain) if word != "..."]
    while words and ASSIGNMENT.match(words[0]):
        words.pop(0)
    if not words:
        return None
    words[0] = words[0].removeprefix(".venv/bin/")
    is_partial = "..." in plain.split()
    match words[0]:
        case "tunesmith":
            return check_tunesmith(words[1:], is_partial=is_partial)
        case "python" | "python3":
            return check_python(words[1:])
        case "make":
            targets = [word for word in words[1:] if "=" not in word]
            known = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            return None if set(targets) <= set(known) else f"the Makefile has no target {targets}"
        case "pip":
            return check_pip(words[1:])
        case _:
            return None if words[0] in PLAIN else f"unknown command {words[0]!r}"


def split_words(line: str) -> list[str]:
    """Words of a line, up to a pipe or a redirection; brackets of optional parts are removed."""
    words = shlex.split(re.sub(r"\[(--?[^\]]*)\]", r"\1", line))
    kept = []
    for word in words:
        if word in ("|", "||", "&&", ">", "<", "<<") and not any(
            each.startswith("--") for each in words[len(kept) + 1 :]
        ):
            break
        if word not in ("|", "&"):
            kept.append(word)
    return kept


@functools.cache
def read_commands() -> Any:
    return typer.main.get_command(app)


def check_tunesmith(words: list[str], *, is_partial: bool = False) -> str | None:
    """Parse the arguments as the command does; a partial line may lack required ones."""
    command: Any = read_commands()
    name = "tunesmith"
    while hasattr(command, "commands"):
        if words and words[0] == "--help":
            return None
        if not words:
            return None if is_partial else f"{name} needs a command"
        if words[0] not in command.commands:
            return f"{name} has no command {words[0]!r}"
        name, command, words = f"{name} {words[0]}", command.commands[words[0]], words[1:]
    try:
        command.make_context(name, [word for word in words if word != "--help"])
    except Exception as error:  # noqa: BLE001 - the classes of click, or of typer's copy of it
        if is_partial and type(error).__name__ == "MissingParameter":
            return None
        return f"{type(error).__name__}: {error}"
    return None


def check_python(words: list[str]) -> str | None:
    """A script of the repository must exist and name every option given to it."""
    if words[:2] == ["-m", "tunesmith"]:
        return check_tunesmith(words[2:])
    if words[:2] == ["-m", "pytest"]:
        missing = [word for word in words[2:] if "/" in word and not (ROOT / word).exists()]
        return f"no such tests: {missing}" if missing else None
    if words[:1] == ["-m"] and words[1].startswith("benchmarks."):
        words = [f"{words[1].replace('.', '/')}.py", *words[2:]]
    if not words or words[0].startswith("-") or "/" not in words[0]:
        return None
    script = ROOT / words[0]
    if not script.exists():
        return f"no script {words[0]}"
    source = script.read_text(encoding="utf-8")
    for module in re.findall(r"^from (benchmarks\.[\w.]+) import", source, re.MULTILINE):
        source += (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    unknown = [word for word in words[1:] if word.startswith("--") and word.partition("=")[0] not in source]
    return f"{words[0]} has no option {unknown}" if unknown else None


def check_pip(words: list[str]) -> str | None:
    """Extras of tunesmith must exist."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        extras = re.fullmatch(r"(?:tunesmith|\.)\[([\w,-]+)\]", word)
        if extras is not None and not set(extras[1].split(",")) <= set(known):
            return f"no extra {extras[1]}"
    return None
