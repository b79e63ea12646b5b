"""`tunesmith environments`: which environments a file can name, what a model reads in one, and an episode to play."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunesmith.commands.settings import load_run_file
from tunesmith.config import RunConfig
from tunesmith.environments.sets import FAMILIES, import_family
from tunesmith.errors import ConfigError
from tunesmith.runs.load_function import load_task_environment


def list_environments(family: str | None = None) -> str:
    """The families with their packages, or the names of one family."""
    if family is None:
        packages = {
            name: f"package {each.package} {each.tested}, "
            + ("installed" if importlib.util.find_spec(each.imported) else "not installed")
            if each.package is not None
            else f"as of {name} {each.tested}, no package"
            for name, each in FAMILIES.items()
        }
        return "\n".join(f"{name}: {each.help} ({packages[name]})" for name, each in FAMILIES.items())
    if family not in FAMILIES:
        raise ConfigError(f"family {family!r}: allowed are {', '.join(FAMILIES)}")
    names: Sequence[str] = getattr(import_family(family), "list_names", list)()
    return "\n".join(f"{family}:{each}".removesuffix(":") for each in names) or f"{family}: {FAMILIES[family].help}"


def show_environment(name: str, seed: int = 0, args: Mapping[str, Any] | None = None) -> str:
    """The limits, the system prompt and the first message of a task, and the tools that come with it."""
    environment = load_task_environment(build_config(name, args))
    task = environment.find_task(seed)

    async def read_first() -> tuple[str, Sequence[Any]]:
        async with environment.open(task) as session:
            return describe_messages(session.messages), session.schemas

    first, tools = asyncio.run(read_first())
    players = f"{environment.num_players} players, " if environment.num_players > 1 else ""
    parts = {
        "environment": environment.name,
        "tasks": ", ".join(f"{split} {len(rows)}" for split, rows in (environment.rows or {}).items()),
        "limits": f"{players}max_turns {environment.max_turns}, step_timeout_s {environment.step_timeout_s:g}",
        "system prompt": environment.system_prompt or "none",
        f"first message of seed {seed}": first,
        "tools": "\n".join(json.dumps(each["function"]) for each in tools),
        "answer": task.get("answer", ""),
    }
    return "\n\n".join(f"{title}:\n{text}" for title, text in parts.items() if text != "")


def play_environment(
    name: str,
    seed: int = 0,
    args: Mapping[str, Any] | None = None,
    model: str | None = None,
    overrides: Sequence[str] = (),
    read: Callable[[str], str] = input,
) -> Any:
    """Play an episode: as `check` runs a workflow, with a model's tokens and reward; or by the user's replies.

    A line of a user is a reply; one that is a JSON object `{"name": ..., "arguments": {...}}` is a call of a tool.
    """
    config = build_config(name, args, model=model, overrides=overrides)
    environment = load_task_environment(config)
    task = environment.find_task(seed)
    if model is not None:
        from tunesmith.commands.check.run import check  # imports torch, which a user's game does not need

        return check(config, task=task)
    if overrides:
        raise ConfigError("--set has no effect without --model: its keys are those of the model's run")

    async def play_by_hand() -> str:
        async with environment.open(task) as session:
            while not session.is_done and len(session.rewards) < environment.max_turns:
                print(describe_messages(session.messages), flush=True)
                try:
                    line = read(f"player {session.player}> " if session.has_players else "> ")
                except EOFError:
                    break
                await environment.step(session, read_reply(line))
                print(f"[reward {sum(session.rewards):g}]", flush=True)
            return f"{describe_messages(session.messages)}\nreward {sum(session.rewards):g}, {session.metrics}"

    return asyncio.run(play_by_hand())


def build_config(
    name: str, args: Mapping[str, Any] | None, *, model: str | None = None, overrides: Sequence[str] = ()
) -> RunConfig:
    changes = [f"environment={json.dumps({'name': name, 'args': dict(args or {})})}", *overrides]
    return load_run_file(None, [f"model.path={json.dumps(model or 'none')}", *changes])


def read_reply(line: str) -> str:
    """The reply that a user's line is."""
    from tunesmith.environments.episode import Reply  # deferred for `list`, which needs no client
    from tunesmith.environments.transcript import Segment

    try:
        call = json.loads(line)
        name, arguments = call["name"], call["arguments"]
    except (ValueError, TypeError, KeyError):
        return Reply(line)
    return Reply(
        "", [Segment(kind="call", text=json.dumps(arguments), tool=name, arguments=arguments, call_id="call1")]
    )


def describe_messages(messages: Sequence[Mapping[str, Any]]) -> str:
    """Messages as a user reads them."""
    return "\n".join(
        each["content"] if each["role"] == "user" else f"{each['role']}: {each['content']}" for each in messages
    )
