"""Task selectors on function calls: accuracy on validation and test tasks by rollouts, and rollouts to an accuracy.

    python -m benchmarks.learning.function_calling_selectors results/runs/function_calling_trl \\
        results/runs/function_calling_selectors --out results/learning/function_calling_selectors.json

The folders have arms `short-SEED` (shuffled tasks), `easy2hard-SEED`, `bots-SEED` and `pareto-SEED`, as
`function_calling_arms` keeps them: the same tasks, steps and evaluations. Rollouts of the pass rates, which the last
three need, are counted apart.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.learning.function_calling_trl import SPLITS, find_first, read_own
from benchmarks.shared.report import publish
from tunesmith.storage import load_json_lines

GROUP_SIZE = 8
SELECTORS = ("short", "easy2hard", "bots", "pareto")


def read_arm(folder: Path, goals: list[float]) -> dict[str, Any]:
    points = read_own(folder)
    steps = [row for row in load_json_lines(folder / "metrics.jsonl") if "perf/step_s" in row]
    useful = [GROUP_SIZE * row["experience/num_useful_groups"] / row["rollout/num_trajectories"] for row in steps]
    return {
        "curve": points,
        "useful_groups": fmean(useful),
        "useful_groups_of_ten_steps": [fmean(useful[start : start + 10]) for start in range(0, len(useful), 10)],
        "rollouts_to": {f"{goal:g}": find_first(points, SPLITS[0], goal, what="rollouts") for goal in goals},
        "mean_after_start": {split: fmean(each[split] for each in points[1:]) for split in SPLITS},
        "last": {split: points[-1][split] for split in SPLITS},
    }


def summarize(arms: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means and sample standard deviations over seeds."""
    summary: dict[str, Any] = {"useful_groups": fmean(arm["useful_groups"] for arm in arms)}
    for figure in ("mean_after_start", "last"):
        for split in SPLITS:
            values = [arm[figure][split] for arm in arms]
            summary[f"{figure}/{split}"] = {"mean": fmean(values), "std": stdev(values)}
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kept", type=Path, nargs="+", help="folders of the arms")
    parser.add_argument("--goals", type=float, nargs="+", default=[0.6, 0.65], help="accuracies on validation tasks")
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    arms = {
        folder.name: read_arm(folder, arguments.goals)
        for selector in SELECTORS
        for kept in arguments.kept
        for folder in sorted(kept.glob(f"{selector}-*"))
    }
    for name, arm in arms.items():
        curve = "  ".join(
            f"{point['step']:.0f}: {point[SPLITS[0]]:.3f} {point[SPLITS[1]]:.3f}" for point in arm["curve"]
        )
        print(
            f"{name:14} useful groups {arm['useful_groups']:.0%}  rollouts to {json.dumps(arm['rollouts_to'])}  {curve}"
        )
    summaries = {
        selector: summarize([arm for name, arm in arms.items() if name.startswith(f"{selector}-")])
        for selector in SELECTORS
    }
    for selector, summary in summaries.items():
        useful = summary.pop("useful_groups")
        figures = "  ".join(f"{name} {each['mean']:.3f} ({each['std']:.3f})" for name, each in summary.items())
        print(f"{selector:10} useful groups {useful:.0%}  {figures}")
    means = {selector: summary["mean_after_start/validation"]["mean"] for selector, summary in summaries.items()}
    publish(
        name="function_calling_selectors", unit="mean accuracy on the validation tasks over the steps, random order",
        ours=means.pop("short"), peers=means, device="cpu",
        details={"selectors": summaries, "arms": arms}, out=arguments.out,
    )  # fmt: skip


if __name__ == "__main__":
    main()
