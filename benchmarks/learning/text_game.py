"""A game on maps that were not trained: before and after training, and rollouts that overlap with training.

    python -m benchmarks.learning.text_game KEPT --out results/learning/text_game.json

The folder has arms `game-SEED` (rollouts of a step end before its training) and `game_async-SEED` (`max_staleness: 1`),
as `function_calling_arms` keeps them. A map is solved if its reward is 1; less is paid for a part of the way.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.shared.report import publish
from tunesmith.storage import load_json_lines

BASE = "game-42"
"""The arm that is evaluated before its first step; all arms begin with the same weights."""


def read_arm(folder: Path) -> dict[str, Any]:
    """Share of solved maps and mean reward after steps, with the seconds and tokens of the steps up to there."""
    rows = load_json_lines(folder / "metrics.jsonl")
    steps = {row["step"]: row for row in rows if "perf/step_s" in row}
    curve = []
    for file in sorted(folder.glob("step_*.json")):
        step = int(file.stem.removeprefix("step_"))
        rewards = [each["rewards"][0] for each in json.loads(file.read_text())["test"]["tasks"]]
        before = [row for number, row in steps.items() if number <= step]
        curve.append(
            {
                "step": step,
                "reward": fmean(rewards),
                "solved": fmean(each == 1 for each in rewards),
                "step_seconds": sum(row["perf/step_s"] for row in before),
                "sampled_tokens": sum(row["rollout/num_sampled_tokens"] for row in before),
            }
        )
    seconds = sum(row["perf/step_s"] for row in list(steps.values())[1:])
    return {
        "curve": curve,
        "median_step_s": sorted(row["perf/step_s"] for row in steps.values())[len(steps) // 2],
        "trained_tokens_per_s": sum(row["train/num_trained_tokens"] for row in list(steps.values())[1:]) / seconds,
        "sampled_tokens_per_s": sum(row["rollout/num_sampled_tokens"] for row in list(steps.values())[1:]) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    folders = sorted(each for each in arguments.folder.glob("game*") if list(each.glob("step_*.json")))
    details = {each.name: read_arm(each) for each in folders}
    by_arm: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name, arm in details.items():
        by_arm[name.rpartition("-")[0]].append(arm)
        last = arm["curve"][-1]
        print(
            f"{name:16} step {last['step']:3}  solved {last['solved']:6.1%}  reward {last['reward']:.3f}  "
            f"{last['step_seconds']:.0f} s in steps  median {arm['median_step_s']:.2f} s  "
            f"{arm['trained_tokens_per_s']:.0f} trained, {arm['sampled_tokens_per_s']:.0f} sampled tokens/s"
        )
    publish(
        name="text_game",
        unit="share of unseen maps that are solved after training, mean of seeds",
        ours=fmean(arm["curve"][-1]["solved"] for arm in by_arm["game"]),
        peers={},
        device="cpu",
        details=details | {"solved before": details[BASE]["curve"][0]["solved"]},
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
