"""Games on tasks that were not trained: before and after training, and rollouts that overlap with training.

    python -m benchmarks.learning.text_game KEPT --out results/learning/text_game.json

The folder has arms `game-SEED` (frozen lakes), `guess-SEED` (a hidden number), and the same with `_async` before the
seed (`max_staleness: 1`; without it the rollouts of a step end before its training), as `function_calling_arms` keeps
them. A task is solved if its reward is 1; less is paid for a part of the way, or for a close guess. With `--walks`,
which needs textarena, each evaluation of the lakes is compared with walks that are the same on every map: moves to the
right and down in a fixed order, up to the first hole. With `--tokenizer`, the model's folder, the kept rollouts of the
hidden number say how many guesses agree with every hint before them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.shared.report import publish
from tunesmith.storage import load_json_lines


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


HIGHEST = 50
GROUP_SIZE = 8
REPLY = re.compile(r"<\|im_start\|>assistant\n(.*?)<\|im_end\|>(.*?)(?=<\|im_start\|>assistant|$)", re.DOTALL)
"""A reply of the model and what the game answers."""


def read_guesses(file: Path, tokenizer: Any) -> dict[str, Any]:
    """Of the rollouts of a step: replies, guesses that agree with all hints so far, the commonest first two guesses,
    and the guesses of the first rollout of three groups, -1 for a reply that is none."""
    import pandas

    num_replies = num_later = num_agreeing = 0
    beginnings, played = Counter[tuple[int, ...]](), list[list[int]]()
    games = [turns[-1] for turns in pandas.read_parquet(file, columns=["turns"])["turns"]]
    for last in games:
        text = tokenizer.decode([*last["prompt_ids"], *last["sampled_ids"]])
        low, high, guesses = 0, HIGHEST + 1, list[int]()
        for reply, answer in REPLY.findall(text):
            num_replies += 1
            found = re.search(r"\[(\d+)\]", reply)
            guess = int(found[1]) if found else -1
            if low > 0 or high <= HIGHEST:
                num_later += 1
                num_agreeing += low < guess < high
            guesses.append(guess)
            if "number is higher" in answer:
                low = max(low, guess)
            elif "number is lower" in answer:
                high = min(high, guess)
        beginnings[tuple(guesses[:2])] += 1
        played.append(guesses)
    return {
        "step": int(file.stem.removeprefix("rollouts_")),
        "replies": num_replies / len(games),
        "agree_with_hints": num_agreeing / num_later,
        "beginnings": [[list(each), number] for each, number in beginnings.most_common(8)],
        "games": played[: 3 * GROUP_SIZE : GROUP_SIZE],
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
    parser.add_argument("--tokenizer", help="folder of the model, to read its guesses")
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    folders = sorted(each for each in arguments.folder.iterdir() if list(each.glob("step_*.json")))
    details = {
        each.name: read_arm(each, has_walks=arguments.walks and each.name.startswith("game")) for each in folders
    }
    solved: dict[str, list[float]] = defaultdict(list)
    for name, arm in details.items():
        solved[name.rpartition("-")[0]].append(arm["curve"][-1]["solved"])
        print(
            f"{name:16} median {arm['median_step_s']:.2f} s  "
            f"{arm['trained_tokens_per_s']:.0f} trained, {arm['sampled_tokens_per_s']:.0f} sampled tokens/s"
        )
        for each in arm["curve"]:
            print(
                f"    step {each['step']:3}  solved {each['solved']:6.1%}  reward {each['reward']:.3f}  "
                f"{each['step_seconds']:.0f} s in steps"
            )
    if arguments.tokenizer:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
        for folder in folders:
            guesses = [read_guesses(file, tokenizer) for file in sorted(folder.glob("rollouts_*.parquet"))]
            for each in guesses:
                details[folder.name].setdefault("guesses", []).append(each)
                print(f"{folder.name:16} {json.dumps(each)}")
    means = {name: fmean(values) for name, values in solved.items()}
    publish(
        name="text_game",
        unit="share of unseen games of guessing a number that are solved after training, mean of seeds",
        ours=means["guess"],
        peers={},
        device="cpu",
        details=details | {"solved after training": means},
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
