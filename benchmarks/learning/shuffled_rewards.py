"""Negative control: with randomly permuted rewards nothing is learned.

    python -m benchmarks.tasks.bots_pocket --out graded
    python -m benchmarks.learning.shuffled_rewards --config graded/run.yaml --data graded/tasks.jsonl --seeds 3 \\
        --out FILE

Each seed trains twice from the same model on the same tasks: with the judge's rewards, and with the rewards of each
step shuffled over all its trajectories. The shuffled rewards have the same values, groups have variance and updates are
as large, but the rewards carry no information. The figure is the gain in held-out accuracy, in points.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.shared.report import publish
from tunesmith.commands.settings import load_run_file
from tunesmith.commands.tune.tune import run_tuning
from tunesmith.compat.chat_models import choose_chat_model
from tunesmith.runs.load_function import load_functions
from tunesmith.storage import load_json_lines
from tunesmith.types import Group


def shuffle_rewards(groups: Sequence[Group], *, seed: int) -> tuple[list[Group], dict[str, float]]:
    """Permute the rewards of the step over all scored trajectories."""
    rewards = [run.reward for group in groups for run in group.scored]
    random.Random(f"{seed}-{groups[0].task.index}-{len(rewards)}").shuffle(rewards)
    shuffled = iter(rewards)
    return [
        replace(
            group,
            trajectories=tuple(
                run if run.reward is None else replace(run, reward=next(shuffled)) for run in group.trajectories
            ),
        )
        for group in groups
    ], {}


def train_one(arguments: argparse.Namespace, *, is_shuffled: bool, seed: int) -> dict[str, Any]:
    """Train one run; returns held-out accuracies and the mean gradient norm."""
    operators = [{"name": "shuffled_rewards:shuffle_rewards", "args": {"seed": seed}}] if is_shuffled else []
    config = load_run_file(
        arguments.config,
        [
            f"train_dataset.path={arguments.data}",
            f"experience.operators={json.dumps(operators)}",
            f"seed={seed}",
            f"name={'shuffled' if is_shuffled else 'judged'}-{seed}",
            "evaluation.at_start=true",
            "continue_from_checkpoint=true",
            *arguments.overrides,
        ],
    )
    workflow, judge = load_functions(config)
    result = run_tuning(
        config, workflow=workflow, judge=judge, build_model=choose_chat_model(config.rollout.chat_model)
    )
    rows = load_json_lines(result.folder / "metrics.jsonl")
    reward = f"eval/{next(iter(config.eval_datasets))}/reward"
    history = [row for row in rows if row["kind"] == "eval"]
    return {
        "accuracy": [row[reward] for row in history],
        "interval": [history[-1][f"{reward}_low"], history[-1][f"{reward}_high"]],
        "grad_norm": statistics.fmean(row.get("train/grad_norm", 0.0) for row in rows if row["kind"] == "train"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="run file")
    parser.add_argument("--data", required=True, help="training tasks")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override a key"
    )
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    details: dict[str, list[dict[str, Any]]] = {"judged": [], "shuffled": []}
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        for name, runs in details.items():
            run = train_one(arguments, is_shuffled=name == "shuffled", seed=seed)
            runs.append(run)
            first, last = run["accuracy"][0], run["accuracy"][-1]
            print(f"seed {seed}  {name:<8} accuracy {first:.3f} -> {last:.3f}  gradient norm {run['grad_norm']:.2f}")
    gains = {
        name: 100 * statistics.fmean(run["accuracy"][-1] - run["accuracy"][0] for run in runs)
        for name, runs in details.items()
    }
    publish(
        name="shuffled_rewards", unit="points of held-out accuracy gained", ours=gains["judged"], peers={},
        device=load_run_file(arguments.config).model.device, details={"gains": gains, **details}, out=arguments.out,
    )  # fmt: skip
    print(f"gain with shuffled rewards: {gains['shuffled']:.1f} points")


if __name__ == "__main__":
    main()
