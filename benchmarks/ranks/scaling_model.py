"""A model of the time of a GRPO step on R GPUs, fitted on what `ranks.py` measured, and its predictions.

    seconds(R) = compute + waiting * g(R) + move * (R - 1) / R + host * (R - 1) + max(collect * (R - 1) - slack, 0)

- compute: a step on one GPU.
- waiting * g(R): each rank waits for the slowest one after rollouts and after the backward pass. g(R) is the expected
  maximum of R standard normal numbers over that of two; waiting is measured on two GPUs.
- move: a ring moves (R - 1) / R of the gradients and of the weights; measured on the fabric of the host. Between hosts
  the same bytes take `--host-bandwidth` GB/s a GPU instead, where that is slower.
- host: the first rank hands out tasks and collects the outlines of each other rank; measured on two GPUs.
- collect, slack: it collects the groups of each other rank while its GPU trains, for which it has `slack` seconds.

What these terms do not explain on two GPUs is a fifth, `rest`, which is kept constant: it is there with any number
of ranks above one. A prediction for more GPUs than were measured is a prediction, not a measurement.

    python -m benchmarks.ranks.scaling_model results/ranks/ranks_cuda/qwen{2.5-1.5b,3-0.6b}.json \\
        --out results/ranks/ranks_cuda/prediction.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.shapes import count_parameters

GPUS_A_HOST = 8


def expect_maximum(number: int) -> float:
    """The expected maximum of that many independent standard normal numbers, by integration."""
    grid = np.linspace(-9.0, 9.0, 20001)
    density = np.exp(-(grid**2) / 2) / np.sqrt(2 * np.pi)
    below = np.cumsum(density) * (grid[1] - grid[0])
    return float(np.sum(grid * number * below ** (number - 1) * density) * (grid[1] - grid[0]))


def read_medians(result: dict[str, Any], *, warmup: int) -> dict[str, float]:
    """Medians of a measurement over its steps."""
    rows = result["steps"][warmup:]
    names = (
        "seconds", "perf/rollout_wait_s", "perf/train_wait_s", "perf/communication_s", "perf/exchange_s",
        "perf/collect_s", "slack_s",
    )  # fmt: skip
    return {name: statistics.median(row.get(name, 0.0) for row in rows) for name in names}


def fit(measured: dict[int, dict[str, float]]) -> dict[str, float]:
    """The terms from one and two GPUs."""
    one, two = measured[1], measured[2]
    terms = {
        "compute": one["seconds"],
        "waiting": two["perf/rollout_wait_s"] + two["perf/train_wait_s"],
        "move": two["perf/communication_s"] * 2,
        "host": two["perf/exchange_s"],
        "collect": two["perf/collect_s"],
        "slack": two["slack_s"],
    }
    known = terms["compute"] + terms["waiting"] + terms["move"] / 2 + terms["host"]
    known += max(terms["collect"] - terms["slack"], 0.0)
    return terms | {"rest": two["seconds"] - known}


def predict(terms: dict[str, float], num_gpus: int, *, num_parameters: int, host_bandwidth: float) -> float:
    """Seconds of a step on that many GPUs, with 8 on each host."""
    if num_gpus == 1:
        return terms["compute"]
    waiting = terms["waiting"] * expect_maximum(num_gpus) / expect_maximum(2)
    moved = (num_gpus - 1) / num_gpus
    move = terms["move"] * moved
    if num_gpus > GPUS_A_HOST:
        num_bytes = (4 + 2) * num_parameters  # float32 gradients are reduced, bfloat16 weights are gathered
        move = max(move, num_bytes * moved / (host_bandwidth * 1e9))
    late = max(terms["collect"] * (num_gpus - 1) - terms["slack"], 0.0)
    return terms["compute"] + waiting + move + terms["host"] * (num_gpus - 1) + late + terms["rest"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="files that ranks.py wrote, with 1 and 2 GPUs")
    parser.add_argument("--predict", default="4,8,16,64", help="numbers of GPUs, with commas")
    parser.add_argument("--host-bandwidth", type=float, default=50.0, help="GB/s a GPU between hosts, assumed")
    parser.add_argument("--out", type=Path, help="JSON file for the terms and predictions")
    arguments = parser.parse_args()
    numbers = [int(number) for number in arguments.predict.split(",")]
    records = []
    terms_named = ("compute", "waiting", "move", "host", "collect", "slack", "rest")
    print("| model | " + " | ".join(terms_named) + " | " + " | ".join(f"{number} GPUs" for number in numbers) + " |")
    print("|---|" + "---:|" * (len(terms_named) + len(numbers)))
    for path in arguments.results:
        record = json.loads(path.read_text())
        shape, warmup = record["arguments"]["shape"], record["arguments"]["warmup"]
        measured = {each["num_ranks"]: read_medians(each, warmup=warmup) for each in record["results"]}
        if not {1, 2} <= set(measured):
            parser.error(f"{path} holds {sorted(measured)} GPUs, the model needs 1 and 2")
        terms = fit(measured)
        size = {"num_parameters": count_parameters(shape), "host_bandwidth": arguments.host_bandwidth}
        predicted = {number: predict(terms, number, **size) for number in numbers}
        efficiency = {number: terms["compute"] / seconds for number, seconds in predicted.items()}
        cells = [f"{terms[name]:.3f}" for name in terms_named]
        cells += [f"{predicted[number]:.2f} s, {efficiency[number]:.0%}" for number in numbers]
        print(f"| {shape} | " + " | ".join(cells) + " |")
        seen = {number: row["seconds"] for number, row in measured.items() if number > 2}
        records.append(
            {"shape": shape, "terms": terms, "predicted_s": predicted, "scaling": efficiency, "measured_s": seen}
        )
    if arguments.out is not None:
        settings = {"host_bandwidth_gb_s": arguments.host_bandwidth, "gpus_a_host": GPUS_A_HOST}
        arguments.out.write_text(json.dumps({"settings": settings, "models": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
