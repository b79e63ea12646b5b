"""`tunesmith environments`: which environments a file can name, and what a model reads in one."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Mapping
from typing import Any

from tunesmith.config import EnvironmentSection, ModelSection, RunConfig
from tunesmith.environments.sets import FAMILIES, import_family
from tunesmith.errors import ConfigError
from tunesmith.runs.load_function import load_task_environment


def list_environments(family: str | None = None) -> str:
    """The families with their packages, or the names of one family."""
    if family is None:
        return "\n".join(
            f"{name}: {each.help} (package {each.package} {each.tested}, "
            f"{'installed' if importlib.util.find_spec(name) else 'not installed'})"
            for name, each in FAMILIES.items()
        )
    if family not in FAMILIES:
        raise ConfigError(f"family {family!r}: allowed are {', '.join(FAMILIES)}")
    return "\n".join(f"{family}:{each}".removesuffix(":") for each in import_family(family).list_names())


def show_environment(name: str, seed: int = 0, args: Mapping[str, Any] | None = None) -> str:
    """The limits, the system prompt and the first message of a task."""
    section = EnvironmentSection(name=name, args=dict(args or {}))
    environment = load_task_environment(RunConfig(model=ModelSection(path="none"), environment=section))
    fields = {} if environment.describe is None else environment.describe(seed)

    async def read_first() -> str:
        async with environment.open({"environment": name, "seed": seed, **fields}) as session:
            return session.observation

    parts = {
        "environment": environment.name,
        "limits": f"max_turns {environment.max_turns}, step_timeout_s {environment.step_timeout_s:g}",
        "system prompt": environment.system_prompt or "none",
        f"first message of seed {seed}": asyncio.run(read_first()),
        **({"answer": fields["answer"]} if "answer" in fields else {}),
    }
    return "\n\n".join(f"{title}:\n{text}" for title, text in parts.items())
