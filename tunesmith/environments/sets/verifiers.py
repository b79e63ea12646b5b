"""verifiers: its v1 environments, in an interpreter of their own (`environment.python`), which has their packages.

A child process (`verifiers_worker`) has the environment. It lists the tasks, and plays an episode with the
environment's own loop, whose model calls come back to this process over HTTP: so tokens are recorded here, where they
are sampled, and the rewards are those of the environment. An episode that ends without a reward is a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunesmith.environments.episode import TaskEnvironment
from tunesmith.environments.sets import FAMILIES, Stateless, warn_of_version
from tunesmith.errors import ConfigError, ServerLostError, ToolUnavailableError
from tunesmith.json_rpc import RpcError, ServerProcess, SharedServer
from tunesmith.types import WorkflowOutput

WORKER = Path(__file__).parent / "verifiers_worker.py"
START_TIMEOUT_S = 300.0
"""Seconds of a start, which imports the package for ten seconds or more, and of listing tasks."""
BLOCK = 256
"""Tasks that are read at a time."""


def load(member: str, args: dict[str, Any]) -> TaskEnvironment:
    python = args.pop("python")
    environment = load_environment(member, json.dumps(args, sort_keys=True), python or sys.executable)
    return TaskEnvironment(
        name=f"verifiers:{member}", create=Prompt, describe=environment.describe, run=environment.run
    )


@functools.cache
def load_environment(name: str, args: str, python: str) -> VerifiersEnvironment:
    """The environment; a file that is read twice has one process."""
    return VerifiersEnvironment(name, json.loads(args), python=python)


class Prompt(Stateless):
    """What the model reads first, for `tunesmith environments show`; episodes are played by `VerifiersEnvironment`."""

    async def reset(self, task: Mapping[str, Any]) -> str:
        prompt = task["data"].get("prompt")
        return prompt if isinstance(prompt, str) else json.dumps(prompt)

    async def step(self, action: str) -> tuple[str, float, bool]:
        raise NotImplementedError("the environment plays its episodes in its own process")


class VerifiersEnvironment:
    """The process of an environment, started again when it is lost; and the tasks that it has listed."""

    def __init__(self, name: str, args: Mapping[str, Any], *, python: str) -> None:
        self._name, self._args, self._python = name, args, python
        self._shared = SharedServer(self._start)
        self._tasks: list[Mapping[str, Any]] = []
        self._has_more = True
        self.describe(0)

    def describe(self, seed: int) -> Mapping[str, Any]:
        """The task with that number; a finite set begins again after its last one."""
        try:
            while self._has_more and len(self._tasks) <= seed:
                found = self._shared.get().call("tasks", {"number": BLOCK}, timeout_s=START_TIMEOUT_S)
                self._tasks += found
                self._has_more = len(found) == BLOCK
        except (ToolUnavailableError, RpcError, TimeoutError) as error:
            raise ConfigError(str(error) or f"environment verifiers:{self._name} lists no tasks in time") from error
        if not self._tasks:
            raise ConfigError(f"environment verifiers:{self._name} has no tasks")
        return {"data": self._tasks[seed % len(self._tasks)]}

    async def run(self, task: Mapping[str, Any], model: Any) -> WorkflowOutput:
        """Play the episode of a task."""
        url = f"{model.base_url.removesuffix('/v1')}/t/{model.as_openai_client().api_key}/v1"
        params = {"data": task["data"], "base_url": url, "model": model.model_name}
        server = await asyncio.to_thread(self._shared.get)
        try:
            return WorkflowOutput(**await asyncio.to_thread(server.call, "run", params, timeout_s=None))
        except asyncio.CancelledError:
            with contextlib.suppress(ServerLostError):
                server.notify("cancel", {"base_url": url})
            raise
        except ServerLostError:
            self._shared.forget(server)
            raise
        except RpcError as error:
            raise ToolUnavailableError(f"environment verifiers:{self._name}: {error}") from error

    def _start(self) -> ServerProcess:
        label = f"environment verifiers:{self._name}, in {self._python},"
        server = ServerProcess([self._python, "-P", str(WORKER)], label=label)
        try:
            found = server.call("load", {"name": self._name, "args": self._args}, timeout_s=START_TIMEOUT_S)
        except (ServerLostError, RpcError, TimeoutError) as error:
            server.close()
            cause = str(error).removeprefix(f"{label} ") or f"it has not started within {START_TIMEOUT_S:g} s"
            raise ToolUnavailableError(
                f"{label} cannot be loaded: {cause}. Install verifiers=={FAMILIES['verifiers'].tested} and the "
                "environment there, or set environment.python to the interpreter that has them"
            ) from error
        warn_of_version("verifiers", found["version"])
        return server
