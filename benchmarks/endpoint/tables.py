"""Figures and tables of `endpoint.py`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.endpoint.load import Measured


def describe(measured: Measured) -> dict[str, float]:
    """Percentiles of the latency in milliseconds, and rates."""
    ordered = sorted(measured.latencies_s)
    cost = {} if measured.cpu_s is None else {"cpu_us_per_call": 1e6 * measured.cpu_s / len(ordered)}
    return cost | {
        "p50_ms": 1e3 * statistics.median(ordered),
        "p99_ms": 1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "calls_per_s": len(ordered) / measured.seconds,
        "tokens_per_s": measured.num_tokens / measured.seconds,
    }


def print_table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{title}\n{'agents':>8}{'':>14}{'p50 ms':>10}{'p99 ms':>10}{'calls/s':>10}{'cpu us/call':>13}")
    for row in rows:
        for name, cell in row.items():
            if name == "error":
                print(f"{row['agents']:>8}  {cell}")
            elif name != "agents":
                cpu = f"{cell['cpu_us_per_call']:>13.0f}" if "cpu_us_per_call" in cell else ""
                print(
                    f"{row['agents']:>8}{name:>14}{cell['p50_ms']:>10.2f}{cell['p99_ms']:>10.2f}"
                    f"{cell['calls_per_s']:>10.0f}{cpu}"
                )


def print_rollouts(rollouts: Mapping[str, Any]) -> None:
    for name, rate in rollouts["tokens_per_s"].items():
        key = name.replace(" ", "_")
        share, in_steps = rollouts.get(f"share_{key}"), rollouts.get(f"step_share_{key}", 0.0)
        print(f"rollouts of {rollouts['agents']} agents, {name:<11}{rate:>10,.0f} tok/s", end="")
        print("" if share is None else f", the endpoint costs {100 * share:.1f} %", end="")
        print(f", {100 * in_steps:.0f} % of the time in engine steps" if in_steps else "")
    if "client_share_http" in rollouts:
        print(
            f"the busiest process of agents over HTTP computes {100 * rollouts['client_share_http']:.0f} % of the time"
        )


def print_docs(path: str) -> None:
    """The table and the rates of docs/endpoint.md from a result."""
    details = json.loads(Path(path).read_text())["details"]
    names = {"no client": "no client", "in process": "in process", "http": "HTTP"}
    columns = {"CPU a call": "cpu_us_per_call", "p50": "p50_ms", "p99": "p99_ms"}
    titles = [f"{column}, {name}" for column in columns for name in names.values()]
    print(f"| agents | {' | '.join(titles)} |")
    print("|---:" * (1 + len(titles)) + "|")
    for row in details["cost"]:
        values = [
            row[name][key] / (1e3 if key == "cpu_us_per_call" else 1) for key in columns.values() for name in names
        ]
        print(f"| {row['agents']} | {' | '.join(f'{value:.3g} ms' for value in values)} |")
    print("calls/s with the most agents:", {name: round(row[name]["calls_per_s"]) for name in names})
    print_rollouts(details["rollouts"])
