"""Agents that call a chat completions server over HTTP, in processes of their own, with little work of the client.

Each agent has one connection and makes its calls one after the other. A process reads a `Load` as one line of JSON,
connects, prints `ready`, waits for a line, runs its agents and prints a `Measured` as one line of JSON. The client
writes requests and reads responses itself, because the official one takes longer than the servers it would measure.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

MAX_PROCESSES = 4
PIPES: dict[str, Any] = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "limit": 2**26}
"""Streams of a process of agents, and the longest line of its output in bytes."""
GROUP_SIZE = 8
"""Agents that ask the same questions, as the rollouts of a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the agents of one process do."""

    port: int
    model: str
    keys: list[str]
    """API keys, one for each agent."""
    first: int
    """Index of the first agent."""
    num_calls: int
    num_tokens: int
    """Tokens a call; on average in conversations."""
    is_growing: bool
    """A call extends the conversation of the one before; else it is a new one."""
    fields: dict[str, Any]
    """Further fields of each request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Calls of agents."""

    latencies_s: list[float]
    num_tokens: int
    """Sampled tokens."""
    seconds: float
    cpu_s: float | None = None
    """Processor seconds of the process that serves, if it is known."""
    client_share: float | None = None
    """Processor time of the busiest process of agents as a share of the time: near 1, the agents are the limit."""


def build_question(agent: int, call: int) -> str:
    """A question of about 50 tokens, equal within a group of agents."""
    group = agent // GROUP_SIZE
    return (
        f"Question {call}: a farm has {group + 17} cows, {3 * group + call} goats and {7 + call} ponds. A cow eats "
        f"{group % 9 + 2} kg of hay a day and every goat half of that. How many kg of hay does the farm need a week?"
    )


def draw_length(agent: int, call: int, num_tokens: int, *, is_growing: bool) -> int:
    """Tokens of a call: those of conversations differ between a quarter and seven quarters of `num_tokens`."""
    if not is_growing:
        return num_tokens
    return random.Random(1000 * agent + call).randint(num_tokens // 4, 7 * num_tokens // 4)


def join_measured(parts: Sequence[Measured]) -> Measured:
    """Several processes that ran at the same time."""
    return Measured(
        latencies_s=[each for part in parts for each in part.latencies_s],
        num_tokens=sum(part.num_tokens for part in parts),
        seconds=max(part.seconds for part in parts),
        client_share=max(part.client_share or 0.0 for part in parts),
    )


async def run_load(
    port: int,
    keys: Sequence[str],
    *,
    model: str,
    num_calls: int,
    num_tokens: int,
    is_growing: bool,
    fields: dict[str, Any],
    limit_s: float = 120.0,
) -> Measured:
    """Run one agent for each key, spread over processes; raises TimeoutError after `limit_s`."""
    num_processes = min(len(keys), MAX_PROCESSES)
    processes, loads, first = [], [], 0
    for index in range(num_processes):
        count = len(keys) // num_processes + (index < len(keys) % num_processes)
        own_keys = list(keys[first : first + count])
        loads.append(
            Load(
                port=port, model=model, keys=own_keys, first=first, num_calls=num_calls, num_tokens=num_tokens,
                is_growing=is_growing, fields=fields,
            )
        )  # fmt: skip
        first += count
    try:
        for load in loads:
            process = await asyncio.create_subprocess_exec(sys.executable, "-m", "benchmarks.endpoint.load", **PIPES)
            processes.append(process)
            await _exchange(process, json.dumps(asdict(load)))
        async with asyncio.timeout(limit_s):
            lines = await asyncio.gather(*(_exchange(process, "go") for process in processes))
        return join_measured([Measured(**json.loads(line)) for line in lines])
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _exchange(process: asyncio.subprocess.Process, line: str) -> bytes:
    """Send a line and return the answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line.encode() + b"\n")
    answer = await process.stdout.readline()
    if not answer:
        raise RuntimeError("a process of the load generator ended with an error, which stands above")
    return answer


class Connection:
    """One keep-alive connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str) -> None:
        self._reader, self._writer, self._key = reader, writer, key

    async def post(self, fields: dict[str, Any]) -> dict[str, Any]:
        body = json.dumps(fields).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {self._key}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        status, *headers = answer.decode().lower().split("\r\n")
        length = next(int(line.split(":")[1]) for line in headers if line.startswith("content-length:"))
        content = await self._reader.readexactly(length)
        if " 200 " not in f"{status} ":
            raise RuntimeError(f"{status}: {content[:500].decode()}")
        return json.loads(content)


async def run_agent(connection: Connection, load: Load, index: int) -> tuple[list[float], int]:
    """Latencies of the agent's calls, and the number of sampled tokens."""
    messages: list[dict[str, str]] = []
    latencies, num_tokens = [], 0
    for call in range(load.num_calls):
        messages.append({"role": "user", "content": build_question(index, call)})
        length = draw_length(index, call, load.num_tokens, is_growing=load.is_growing)
        started = time.perf_counter()
        reply = await connection.post({"model": load.model, "messages": messages, "max_tokens": length, **load.fields})
        latencies.append(time.perf_counter() - started)
        num_tokens += reply["usage"]["completion_tokens"]
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"] or ""})
        if not load.is_growing:
            messages.clear()
    return latencies, num_tokens


async def main() -> None:
    load = Load(**json.loads(sys.stdin.readline()))
    connections = [Connection(*await asyncio.open_connection("127.0.0.1", load.port), key) for key in load.keys]
    print("ready", flush=True)
    sys.stdin.readline()
    started, started_cpu = time.perf_counter(), time.process_time()
    agents = [run_agent(connection, load, load.first + index) for index, connection in enumerate(connections)]
    results = await asyncio.gather(*agents)
    seconds = time.perf_counter() - started
    measured = Measured(
        latencies_s=[each for latencies, _ in results for each in latencies],
        num_tokens=sum(num_tokens for _, num_tokens in results),
        seconds=seconds,
        client_share=(time.process_time() - started_cpu) / seconds,
    )
    print(json.dumps(asdict(measured)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
