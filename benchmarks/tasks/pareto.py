"""The time of group-wise Pareto sampling over a large pool of questions.

    python -m benchmarks.tasks.pareto --num-questions 1000000 --out results/tasks/pareto.json

Two pools of questions with 16 rollouts each. `binary`: correctness 0 or 1 and small counts of tool calls, so that many
questions share a point. `distinct`: correctness in [0, 1] and continuous costs, so that all points differ. The time is
that of `select_pareto` on lists of numbers as they are read from JSON: filter, standard deviations, fronts, crowding.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from benchmarks.shared.report import publish
from tunesmith.et_agent.selection.pareto import select_pareto

NUM_RUNS = 16
SOURCES = ("math", "multi-hop", "comparison", "compute")


def build_pool(kind: str, num_questions: int, rng: np.random.Generator) -> tuple[list[list[float]], list[list[float]]]:
    """Correctness and tool calls of each rollout of each question."""
    shape = (num_questions, NUM_RUNS)
    if kind == "distinct":
        return rng.random(shape).tolist(), rng.gamma(2.0, 1.0, shape).tolist()
    chances_N = rng.beta(0.5, 0.5, num_questions)
    calls_N = rng.gamma(2.0, 1.0, num_questions)
    correctness = (rng.random(shape) < chances_N[:, None]).astype(np.float64)
    return correctness.tolist(), rng.poisson(calls_N[:, None], shape).astype(np.float64).tolist()


def measure(kind: str, num_questions: int, *, num_selected: int) -> dict[str, Any]:
    correctness, calls = build_pool(kind, num_questions, np.random.default_rng(0))
    strata = [SOURCES[index % len(SOURCES)] for index in range(num_questions)]
    record: dict[str, Any] = {"pool": kind, "num_questions": num_questions, "num_runs": NUM_RUNS}
    for name, given in (("seconds", None), ("seconds_stratified", strata)):
        started = time.perf_counter()
        found = select_pareto(correctness, calls, num_selected=num_selected, seed=0, strata=given)
        record[name] = time.perf_counter() - started
    return record | {
        "num_mixed": found.num_mixed,
        "num_selected": len(found.indices),
        "num_fronts_used": int(found.ranks.max()) + 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-questions", type=int, default=1_000_000)
    parser.add_argument("--num-selected", type=int, default=8000)
    parser.add_argument("--out", default=None)
    arguments = parser.parse_args()
    records = [
        measure(kind, arguments.num_questions, num_selected=arguments.num_selected) for kind in ("binary", "distinct")
    ]
    print(f"{'pool':10} {'questions':>10} {'mixed':>9} {'fronts used':>12} {'seconds':>8} {'stratified':>10}")
    for each in records:
        print(
            f"{each['pool']:10} {each['num_questions']:10,} {each['num_mixed']:9,} {each['num_fronts_used']:12,} "
            f"{each['seconds']:8.2f} {each['seconds_stratified']:10.2f}"
        )
    publish(
        name=f"Pareto sampling of {arguments.num_questions} questions",
        unit="questions/s",
        ours=arguments.num_questions / max(each["seconds"] for each in records),
        peers={},
        device="cpu",
        details=records,
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
