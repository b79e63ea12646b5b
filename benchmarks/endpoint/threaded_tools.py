"""Agents of two turns with a slow tool between them: as a coroutine, in `asyncio.to_thread`, or in the user's own pool.

    python -m benchmarks.endpoint.threaded_tools --out results/endpoint/threaded_tools.json [--before BEFORE.json]

A tool in a thread should take no longer than one that is awaited. The model is the pocket model with random weights, on
one CPU thread. `--before` includes the figures of an earlier version, written by this script, in the results.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.report import publish
from tunesmith.config import EngineSection, ModelSection, RolloutSection, RunConfig
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.model.prepare import prepare_model
from tunesmith.rollout.chat_model import ChatModel
from tunesmith.rollout.dispatcher import build_evaluator
from tunesmith.rollout.group import build_requests
from tunesmith.runs.policy import load_actors
from tunesmith.types import Group, Task, WorkflowOutput

GROUP_SIZE = 8

Tool = Callable[[], Awaitable[None]]


def build_tools(seconds: float, num_runs: int) -> dict[str, Tool]:
    """Implementations of the slow tool."""
    pool = ThreadPoolExecutor(num_runs)

    def search() -> None:
        time.sleep(seconds)

    async def wait() -> None:
        await asyncio.sleep(seconds)

    async def use_pool() -> None:
        await asyncio.get_running_loop().run_in_executor(pool, search)

    async def use_thread() -> None:
        await asyncio.to_thread(search)

    return {"asyncio.sleep": wait, "own pool": use_pool, "asyncio.to_thread": use_thread}


def build_workflow(tool: Tool) -> Callable[..., Awaitable[WorkflowOutput]]:
    async def workflow(task: Mapping[str, Any], model: ChatModel) -> WorkflowOutput:
        messages = [{"role": "user", "content": task["question"]}]
        first = await model(messages)
        await tool()
        reply = {"role": "assistant", "content": first.choices[0].message.content or ""}
        second = await model([*messages, reply, {"role": "user", "content": "The tool is done. Go on."}])
        return WorkflowOutput(reward=float(len(second.choices[0].message.content or "") % 2))

    return workflow


def measure(tool: Tool, arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """Seconds of the rollouts of each step; in the first step the event loop detects which functions are slow."""
    config = RunConfig(
        model=ModelSection(path=model, device="cpu", max_model_len=256, max_tokens=arguments.new_tokens),
        engine=EngineSection(kv_cache_tokens=32768),
        rollout=RolloutSection(chat_model="openai"),
    )
    _, actors = load_actors(
        config,
        workflow=build_workflow(tool),
        judge=None,
        build_model=lambda endpoint, options: ChatModel(endpoint, options=options),
    )
    tasks = [
        Task(task_id=f"t/{i}", index=i, row={"question": f"Tom has {i} apples. How many?"})
        for i in range(arguments.runs // GROUP_SIZE)
    ]

    async def run() -> tuple[list[float], list[Group]]:
        seconds, groups = [], []
        async with build_evaluator(actors) as dispatcher:
            for step in range(arguments.steps):
                started = time.perf_counter()
                requests = build_requests(tasks, size=GROUP_SIZE, seed=0, step=step)
                groups = await dispatcher.evaluate(requests, policy_version=step)
                seconds.append(time.perf_counter() - started)
        return seconds, groups

    seconds, groups = run_lockstep(run())
    runs = [run for group in groups for run in group.trajectories]
    assert len(runs) == arguments.runs and all(len(run.turns) == 2 for run in runs)
    return {"first_step_s": seconds[0], "step_s": statistics.median(seconds[1:]), "all_s": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=64, help="rollouts per step")
    parser.add_argument("--tool-s", type=float, default=0.5, help="duration of the tool in seconds")
    parser.add_argument("--new-tokens", type=int, default=24, help="tokens per turn")
    parser.add_argument("--steps", type=int, default=6, help="measured steps")
    parser.add_argument("--before", help="result file of an earlier version")
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = str(prepare_model("pocket", Path(folder) / "pocket"))
        tools = build_tools(arguments.tool_s, arguments.runs)
        details: dict[str, Any] = {name: measure(tool, arguments, model) for name, tool in tools.items()}
    for name, found in details.items():
        times = "  ".join(f"{value:.2f}" for value in found["all_s"])
        print(f"{name:20s} median {found['step_s']:.2f} s, steps {times}")
    details["settings"] = {name: value for name, value in vars(arguments).items() if name not in ("before", "out")}
    if arguments.before:
        details["before"] = json.loads(Path(arguments.before).read_text())["details"]
    rates = {name: 1 / details[name]["step_s"] for name in tools}
    publish(
        name="threaded_tools", unit="steps/s", ours=rates["asyncio.to_thread"],
        peers={"asyncio.sleep": rates["asyncio.sleep"]}, device="cpu", details=details, out=arguments.out,
    )  # fmt: skip


if __name__ == "__main__":
    main()
