"""A game on maps that were not trained: before and after training, and rollouts that overlap with training.

    python -m benchmarks.learning.text_game KEPT --out results/learning/text_game.json

The folder has arms `game-SEED` (rollouts of a step end before its training) and `game_async-SEED` (`max_staleness: 1`),
as `function_calling_arms` keeps them. A map is solved if its reward is 1; less is paid for a part of the way. With
`--walks`, which needs textarena, each evaluation is compared with walks that are the same on every map: moves to the
right and down in a fixed order, up to the first hole.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.shared.report import publish
from tunesmith.storage import load_json_lines

BASE = "game-42"
"""The arm that is evaluated before its first step; all arms begin with the same weights."""


def walk(grid: Sequence[Sequence[str]], moves: Sequence[str]) -> float:
    """The part of the way to the opposite corner that is done before a hole."""
    row = column = 0
    for number, move in enumerate(moves, start=1):
        row, column = (row + 1, column) if move == "down" else (row, column + 1)
        if grid[row][column] == "H":
            return number / len(moves)
    return 1.0


def compare_walks(rewards: Mapping[int, float]) -> dict[str, Any]:
    """The walk that agrees with most rewards by seed of a map, and the walk that solves most maps."""
    import textarena

    grids = {}
    for seed in rewards:
        game = textarena.make("FrozenLake-v0")
        game.reset(num_players=1, seed=seed)
        while hasattr(game, "env"):
            game = game.env
        grids[seed] = game.state.game_state["grid"]
    num_moves = len(grids[min(grids)]) - 1
    found: list[dict[str, Any]] = []
    for moves in sorted(set(itertools.permutations(("right", "down") * num_moves))):
        paid = {seed: walk(grid, moves) for seed, grid in grids.items()}
        same = sum(abs(paid[seed] - reward) < 1e-3 for seed, reward in rewards.items())
        found.append(
            {"moves": " ".join(moves), "same_reward": same, "solved": sum(each == 1 for each in paid.values()),
             "reward": fmean(paid.values())}
        )  # fmt: skip
    return {
        "most_alike": max(found, key=lambda each: each["same_reward"]),
        "solves_most": max(found, key=lambda each: each["solved"]),
    }


def read_arm(folder: Path, *, has_walks: bool) -> dict[str, Any]:
    """Share of solved maps and mean reward after steps, with the seconds and tokens of the steps up to there."""
    rows = load_json_lines(folder / "metrics.jsonl")
    steps = {row["step"]: row for row in rows if "perf/step_s" in row}
    curve = []
    for file in sorted(folder.glob("step_*.json")):
        step = int(file.stem.removeprefix("step_"))
        paid = {each["row"]["seed"]: each["rewards"][0] for each in json.loads(file.read_text())["test"]["tasks"]}
        rewards = paid.values()
        before = [row for number, row in steps.items() if number <= step]
        curve.append(
            {
                "step": step,
                "reward": fmean(rewards),
                "solved": fmean(each == 1 for each in rewards),
                "step_seconds": sum(row["perf/step_s"] for row in before),
                "sampled_tokens": sum(row["rollout/num_sampled_tokens"] for row in before),
            }
            | ({"walks": compare_walks(paid)} if has_walks else {})
        )
    measured = list(steps.values())[1:] or list(steps.values())
    seconds = sum(row["perf/step_s"] for row in measured)
    return {
        "curve": curve,
        "median_step_s": sorted(row["perf/step_s"] for row in steps.values())[len(steps) // 2],
        "trained_tokens_per_s": sum(row["train/num_trained_tokens"] for row in measured) / seconds,
        "sampled_tokens_per_s": sum(row["rollout/num_sampled_tokens"] for row in measured) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--walks", action="store_true", help="compare with fixed walks; needs textarena")
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    folders = sorted(each for each in arguments.folder.glob("game*") if list(each.glob("step_*.json")))
    details = {each.name: read_arm(each, has_walks=arguments.walks) for each in folders}
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
