"""Plays episodes of a verifiers environment: a program for an interpreter that has the package, and nothing of ours.

It reads JSON-RPC requests from standard input, a line each, and answers on standard output: `load` reads the task set,
`tasks` lists tasks, `run` plays the episode of one with model calls to its URL, and `cancel` ends the one of a URL.
"""

import asyncio
import functools
import itertools
import json
import os
import sys
from collections.abc import Awaitable
from typing import Any, TextIO

import verifiers
import verifiers.v1 as v1
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


class Worker:
    """One environment, and the episodes that run."""

    def load(self, name: str, args: dict[str, Any]) -> dict[str, str]:
        # the package's own default is a runtime in the cloud
        args = {**args, "agent": {"runtime": {"type": "subprocess"}, **args.get("agent", {})}}
        config = resolve_env_config({**args, "taskset": {**args.get("taskset", {}), "id": name}})
        agents = list(agent_config_fields(config))
        if agents != ["agent"]:
            raise ValueError(f"it has the agents {', '.join(agents)}; environments with one agent are supported")
        if config.retries != type(config.retries)() or config.agent.retries != type(config.agent.retries)():
            raise ValueError("retries repeat an episode in the same rollout: leave them out")
        self.env = load_environment(config)
        self.tasks = iter(self.env.taskset)
        return {"version": verifiers.__version__}

    def list_tasks(self, number: int) -> list[dict[str, Any]]:
        """The next tasks."""
        return [
            each.data.model_dump(mode="json", exclude_defaults=True) for each in itertools.islice(self.tasks, number)
        ]

    async def run(self, data: dict[str, Any], base_url: str, model: str) -> dict[str, Any]:
        kind = type(self.env.taskset).task_type()
        task = kind(kind.data_type().model_validate(data), self.env.config.taskset.task)
        client = EvalClientConfig(base_url=base_url, api_key_var="TUNESMITH_KEY_IN_URL")
        (slot,) = self.env.slots(task)
        episode = await self.env.run_slot(slot, ModelContext(model=model, client=client, sampling=v1.SamplingConfig()))
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors or not episode.ok:
            raise RuntimeError("; ".join(f"{each.type}: {each.message}" for each in errors) or "the episode is not ok")
        (trace,) = episode.traces
        rewards = {name: each.value for name, each in trace.rewards.items() if each is not None}
        if not rewards:
            raise RuntimeError(f"the episode has no reward (stop: {trace.stop_condition})")
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return {"reward": sum(rewards.values()), "metrics": rewards | metrics}


async def serve(output: TextIO) -> None:
    worker = Worker()
    running: dict[str, asyncio.Task[None]] = {}

    async def answer(number: int, work: Awaitable[Any]) -> None:
        try:
            reply: dict[str, Any] = {"result": await work}
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - the environment's code
            reply = {"error": {"code": -32000, "message": f"{type(error).__name__}: {error}"}}
        output.write(json.dumps({"jsonrpc": "2.0", "id": number, **reply}) + "\n")
        output.flush()

    async def receive() -> Any:
        line = await asyncio.to_thread(sys.stdin.buffer.readline)
        return json.loads(line) if line else None

    first = await receive()
    await answer(first["id"], asyncio.to_thread(worker.load, **first["params"]))
    async with worker.env.serving():
        while (message := await receive()) is not None:
            params = message["params"]
            if message["method"] == "tasks":
                await answer(message["id"], asyncio.to_thread(worker.list_tasks, **params))
            elif message["method"] == "run":
                episode = asyncio.create_task(answer(message["id"], worker.run(**params)))
                running[params["base_url"]] = episode
                episode.add_done_callback(functools.partial(running.pop, params["base_url"]))
            elif message["method"] == "cancel" and params["base_url"] in running:
                running[params["base_url"]].cancel()


if __name__ == "__main__":
    own_output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what environments print is no answer
    asyncio.run(serve(own_output))
