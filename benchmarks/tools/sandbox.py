"""Latency and throughput of the Python tool, beside a fresh interpreter and a cold bubblewrap for each call.

    taskset -c 0,1 python -m benchmarks.tools.sandbox --out results/tools/sandbox.json

Calls of all ways alternate in short rounds, so that other load on the machine meets all of them. Latencies are those of
one call at a time; the throughput of a round is that of `--workers` calls at a time. The fresh interpreter isolates
nothing; the cold bubblewrap starts the interpreter in the sandbox of the tool for each call.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

from benchmarks.shared.report import publish
from tunesmith.config import PythonToolSection
from tunesmith.errors import SandboxError
from tunesmith.tools.python.isolation import build_plan, find_installed_files, list_isolations
from tunesmith.tools.python.tool import PythonTool

CODE = "print(sum(i * i for i in range(100)))"
EXPECTED = "328350"


def build_tool_way(tool: PythonTool) -> Callable[[int, int], list[float]]:
    """Times of `num_calls` calls, `at_a_time` at a time."""

    async def call() -> float:
        started = time.perf_counter()
        result = await tool(CODE)
        assert result.text == EXPECTED, result
        return time.perf_counter() - started

    async def run(num_calls: int, at_a_time: int) -> list[float]:
        left = iter(range(num_calls))

        async def serve() -> list[float]:
            return [await call() for _ in left]

        return list(chain.from_iterable(await asyncio.gather(*(serve() for _ in range(at_a_time)))))

    return lambda num_calls, at_a_time: asyncio.run(run(num_calls, at_a_time))


def build_process_way(command: Sequence[str], environment: dict[str, str]) -> Callable[[int, int], list[float]]:
    def call(_: int) -> float:
        started = time.perf_counter()
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert ended.stdout.strip() == EXPECTED
        return time.perf_counter() - started

    def run(num_calls: int, at_a_time: int) -> list[float]:
        with ThreadPoolExecutor(at_a_time) as threads:
            return list(threads.map(call, range(num_calls)))

    return run


def build_cold_bubblewrap() -> Callable[[int, int], list[float]]:
    """The namespaces and mounts of the tool around `python -c`, started for each call."""
    settings = PythonToolSection()
    plan = build_plan(list_isolations(settings)[0], settings)
    module = plan.command.index("-m")
    return build_process_way([*plan.command[:module], "-c", CODE], dict(plan.environment))


def summarize(rounds: list[list[float]], rates: list[float]) -> dict[str, float]:
    """Figures over all calls, and the median of the round that other load disturbed least."""
    milliseconds = sorted(1000 * value for value in chain.from_iterable(rounds))
    return {
        "min_ms": milliseconds[0],
        "p10_ms": milliseconds[len(milliseconds) // 10],
        "median_ms": statistics.median(milliseconds),
        "median_of_quietest_round_ms": 1000 * min(statistics.median(seconds) for seconds in rounds),
        "p99_ms": milliseconds[min(len(milliseconds) - 1, len(milliseconds) * 99 // 100)],
        "num_calls": len(milliseconds),
        "median_calls_per_s": statistics.median(rates),
        "best_calls_per_s": max(rates),
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    tools = {
        f"warm {name}": PythonTool(PythonToolSection(num_workers=arguments.workers, **settings))
        for name, settings in (
            ("bubblewrap", {"isolation": "bubblewrap"}),
            ("seccomp", {"isolation": "seccomp"}),
            ("bubblewrap, numpy and sympy", {"isolation": "bubblewrap", "packages": ("numpy", "sympy")}),
        )
    }
    ways = {}
    for name, tool in tools.items():
        try:
            asyncio.run(tool.start())
        except SandboxError as error:
            print(f"{name}: {error}")
            continue
        ways[name] = build_tool_way(tool)
    ways["fresh python -I -S -c, not isolated"] = build_process_way(
        [find_installed_files(()).interpreter, "-I", "-S", "-c", CODE], {}
    )
    if "warm bubblewrap" in ways:
        ways["cold bubblewrap"] = build_cold_bubblewrap()
    latencies: dict[str, list[list[float]]] = {name: [] for name in ways}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    loads = []
    for _ in range(arguments.rounds):
        loads.append(os.getloadavg()[0])
        for name, run in ways.items():
            num_calls = arguments.calls if name.startswith("warm") else max(2, arguments.calls // 8)
            latencies[name].append(run(num_calls, 1))
            started = time.perf_counter()
            run(num_calls, arguments.workers)
            rates[name].append(num_calls / (time.perf_counter() - started))
    for tool in tools.values():
        tool.close()
    found = {name: summarize(latencies[name], rates[name]) for name in ways}
    return found | {"load_average": {"min": min(loads), "median": statistics.median(loads), "max": max(loads)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=40, help="warm calls of a round")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2, help="workers, and calls at a time for the throughput")
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    details = measure(arguments)
    for name, found in details.items():
        print(f"{name:40s}" + "  ".join(f"{key} {value:.1f}" for key, value in found.items()))
    details["settings"] = {name: value for name, value in vars(arguments).items() if name != "out"}
    details["settings"]["num_cpus"] = len(os.sched_getaffinity(0))
    peers = {name: found["median_calls_per_s"] for name, found in details.items() if name.startswith(("fresh", "cold"))}
    publish(
        name="sandbox", unit="calls/s", ours=details["warm bubblewrap"]["median_calls_per_s"], peers=peers,
        device="cpu", details=details, out=arguments.out,
    )  # fmt: skip


if __name__ == "__main__":
    main()
