"""Episodes of environments with a model that answers at once: what they leave behind, and what the layer costs.

    python -m benchmarks.environments.episodes --out results/environments/episodes.txt

For each set, 5,000 episodes are played, 64 at a time: open sessions, file descriptors, threads, child processes and
memory before and after; `--set NAME REPLY --args JSON` is another one. `--set mcp REPLY --args '{"server": COMMAND}'`
has the tools of an MCP server, in a session of each episode, of which `--call` calls one. Of `--set verifiers:NAME` the
model is an HTTP server. The cost of the layer is the time of an episode
of ten steps in an environment that does nothing, without its model calls, with 1, 64 and 512 episodes at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openai.types.chat import ChatCompletion

from tunesmith.environments.episode import TaskEnvironment, play, play_seat
from tunesmith.environments.sets import load_set
from tunesmith.rollout.open_sessions import count_open_sessions
from tunesmith.tools.mcp import load_mcp_tools

SETS = {
    "reasoning_gym:leg_counting": "<answer>1</answer>",
    "gymnasium:FrozenLake-v1": "right",
    "textarena:GuessTheNumber-v0": "[3]",
    "textarena:TicTacToe-v0": "[4]",
    "bfcl": "No call.",
    "bfcl:multi_turn_base": "No call.",
}
TRAINING_STEP_S = 2.9
"""A training step of 64 tasks with 8 rollouts each (Qwen3-0.6B, one H200)."""


def build_completion(**message: Any) -> ChatCompletion:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}
    values = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    return ChatCompletion.model_validate(values)


def build_model(reply: str, call: dict[str, Any] | None = None) -> SimpleNamespace:
    """A model that answers at once, after a tool call if one is given."""
    completion = calling = build_completion(content=reply)
    if call is not None:
        function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
        calling = build_completion(content="", tool_calls=[{"id": "c", "type": "function", "function": function}])

    async def create(**fields: Any) -> ChatCompletion:
        await asyncio.sleep(0)
        return calling if fields["messages"][-1]["role"] == "user" else completion

    return SimpleNamespace(
        client=SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create))), model_name="m"
    )


def serve_model(reply: str) -> SimpleNamespace:
    """The same over HTTP."""
    body = build_completion(content=reply).model_dump_json().encode()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = SimpleNamespace(api_key="key")
    url = f"http://127.0.0.1:{server.server_port}/v1"
    return SimpleNamespace(base_url=url, model_name="m", as_openai_client=lambda: client)


class WithTools:
    """An episode that ends with a reply without a call; a call that fails is not paid."""

    def __init__(self, tools: list) -> None:
        self.tools = tools

    async def reset(self, task: object) -> str:
        return "Call a tool."

    async def step(self, action: str) -> tuple[str, float, bool]:
        return "", 1.0, True

    async def close(self) -> None:
        pass


def load(name: str, args: dict[str, Any]) -> TaskEnvironment:
    if name != "mcp":
        return load_set(name, args)
    tools = load_mcp_tools(args["server"], is_session=True)
    return TaskEnvironment(name="mcp", create=partial(WithTools, tools))


async def play_all(environment: TaskEnvironment, rows: list, model: Any, *, number: int, at_a_time: int) -> int:
    """Play episodes; returns their number."""
    left, replies = iter(range(number)), 0

    async def work() -> None:
        nonlocal replies
        for index in left:
            row = rows[index % len(rows)]
            if environment.num_players > 1:
                output = await play_seat(row, model, environment, {"opponent": model})
            else:
                output = await play(row, model, environment)
            replies += 1
            assert output.reward is not None

    await asyncio.gather(*(work() for _ in range(at_a_time)))
    return replies


def measure_process() -> dict[str, int]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "sessions": count_open_sessions(),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "children": len(children),
        "kB": pages * resource.getpagesize() // 1024,
    }


class Nothing:
    """Ten steps without work."""

    async def reset(self, task: object) -> str:
        self.left = 10
        return "a"

    async def step(self, action: str) -> tuple[str, float, bool]:
        self.left -= 1
        return "a", 0.0, not self.left

    async def close(self) -> None:
        pass


class PlainNothing:
    """The same with plain functions, which run in threads."""

    def reset(self, task: object) -> str:
        self.left = 10
        return "a"

    def step(self, action: str) -> tuple[str, float, bool]:
        self.left -= 1
        return "a", 0.0, not self.left

    def close(self) -> None:
        pass


async def call_model_only(number: int, at_a_time: int) -> None:
    """The model calls of `play_all` alone."""
    model, left = build_model("a"), iter(range(number))
    messages = [{"role": "user", "content": "a"}]

    async def work() -> None:
        for _ in left:
            for _ in range(10):
                await model.client.chat.completions.create(model="m", messages=messages, stream=False)

    await asyncio.gather(*(work() for _ in range(at_a_time)))


def time_of(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=5000)
    parser.add_argument("--set", nargs=2, metavar=("NAME", "REPLY"), help="this set alone, and no cost of the layer")
    parser.add_argument("--rows", type=int, default=200, help="its tasks, which are played in turn")
    parser.add_argument("--args", type=json.loads, default={}, help="its environment.args, as JSON")
    parser.add_argument("--call", type=json.loads, help="a call before each reply, as {name, arguments}")
    parser.add_argument("--repeats", type=int, default=5, help="of each cost, of which the median is reported")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    lines = [f"{given.episodes} episodes of each set, 64 at a time: before, after"]
    for name, reply in [given.set] if given.set else SETS.items():
        environment = load(name, given.args)
        split = "test" if environment.rows is not None and not environment.rows["train"] else "train"
        rows = environment.list_rows(split, number=given.rows, seed=0)
        model = serve_model(reply) if environment.run else build_model(reply, given.call)
        asyncio.run(play_all(environment, rows, model, number=min(200, given.episodes), at_a_time=64))
        before = measure_process()
        seconds = time_of(
            lambda: asyncio.run(play_all(environment, rows, model, number=given.episodes, at_a_time=64))  # noqa: B023
        )
        after = measure_process()
        counts = ", ".join(f"{key} {before[key]} -> {after[key]}" for key in before)
        lines.append(f"{name}: {1e3 * seconds / given.episodes:.2f} ms an episode; {counts}")
        print(lines[-1], flush=True)
    lines.append("microseconds of the layer for one step, median and range, and 512 of them as part of a training step")
    for kind in () if given.set else (Nothing, PlainNothing):
        environment = TaskEnvironment(name="nothing", create=kind)
        for at_a_time in (1, 64, 512):
            number, costs = 1024, []
            for _ in range(given.repeats):
                played = partial(play_all, environment, [{}], build_model("a"), number=number, at_a_time=at_a_time)
                whole = time_of(lambda: asyncio.run(played()))  # noqa: B023
                alone = time_of(lambda: asyncio.run(call_model_only(number, at_a_time)))  # noqa: B023
                costs.append((whole - alone) / number / 10)
            each, spread = statistics.median(costs), f"{1e6 * min(costs):.0f} to {1e6 * max(costs):.0f}"
            share = 512 * each / TRAINING_STEP_S
            lines.append(f"{kind.__name__}, {at_a_time} at a time: {1e6 * each:.0f} us ({spread}), {100 * share:.2f} %")
            print(lines[-1], flush=True)
    if given.out is not None:
        given.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
