"""GRPO and ARPO at equal tool calls: a search and Python agent on the questions of a fictional world, pocket model.

Each seed runs the stages of recipes/tool_agent/pocket.yaml up to SFT, then reinforcement learning from the same
fine-tuned model with each method, with the same number of rollouts a step. A step of branching rollouts makes fewer
tool calls, so it runs more steps. Held-out questions are evaluated at intervals. The table compares the methods where
their total number of executed tool calls is equal: calls that a branch inherits are not executed again.

    python benchmarks/branching_world.py --seeds 0 1 2 --out results/branching/world_pocket.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import yaml
from report import publish

from tunesmith import run_pipeline

RECIPE = Path(__file__).parent.parent / "recipes" / "tool_agent" / "pocket.yaml"
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "arpo": {"branching": {"credit": "soft"}},
    "arpo_hard": {"branching": {"credit": "hard"}},
    "aepo_rollout": {"branching": {"dynamic_budget_slope": 1.0, "consecutive_penalty": 0.2}},
}
"""Method -> section `rollout` of its run."""
COUNTED = {"tool_calls": "executed tool calls", "sampled_tokens": "sampled tokens", "seconds": "seconds of steps"}


def build_pipeline(arguments: argparse.Namespace, *, seed: int) -> dict[str, Any]:
    """The recipe with one reinforcement-learning stage per method in place of its own, and without its comparison."""
    pipeline = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    pipeline["folder"] = str((arguments.folder / f"seed{seed}").absolute())
    pipeline["variables"]["seed"] = seed
    pipeline["variables"]["world"]["num_test"] = arguments.num_test
    stages = pipeline["stages"]
    common = stages.pop("rl")
    del stages["eval"]
    for name in arguments.methods:
        sizes = {"group_size": arguments.group_size, "batch_size": arguments.batch_size}
        num_steps = arguments.steps if name == "grpo" else round(arguments.steps * arguments.more_steps)
        stages[name] = {
            **common,
            "kind": "rl",
            "total_steps": num_steps,
            "save_interval_steps": num_steps,
            "algorithm": {**common["algorithm"], **sizes},
            "trainer": {**common["trainer"], "schedule": "constant", "min_lr_ratio": 0.0},
            "rollout": METHODS[name],
            "eval_datasets": {"test": {"path": "stage:world/test.jsonl"}},
            "evaluation": {
                "interval_steps": arguments.interval,
                "at_start": True,
                "num_samples": arguments.num_samples,
            },
            "monitor": {"log_interval_steps": arguments.interval, "has_progress": False},
        }
    return pipeline


def read_curve(run: Path) -> list[dict[str, float]]:
    """Held-out figures of each evaluation, with what the training steps before it made in total."""
    totals = dict.fromkeys(COUNTED, 0.0)
    points = []
    for line in map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        if line["kind"] == "train":
            num_scored = line["rollout/num_trajectories"] - line["rollout/num_failed"]
            inherited = line.get("rollout/num_inherited_tool_calls", 0.0)
            totals["tool_calls"] += line["rollout/tool_calls/mean"] * num_scored - inherited
            totals["sampled_tokens"] += line["engine/num_sampled_tokens"]
            totals["seconds"] += line["perf/step_s"]
        elif line["kind"] == "eval":
            figures = {
                name: line[f"eval/test/{name}"] for name in ("reward", "reward_low", "reward_high", "em", "tool_calls")
            }
            points.append({"step": line["step"], **{f"total_{k}": v for k, v in totals.items()}, **figures})
    return points


def find_point(curve: list[dict[str, float]], budget: float) -> dict[str, float]:
    """The last evaluation within a budget of tool calls."""
    return [point for point in curve if point["total_tool_calls"] <= budget][-1]


def describe(points: list[dict[str, float]]) -> dict[str, float]:
    """Means over seeds, and the range of the accuracy."""
    names = [name for name in points[0] if name != "step"]
    means = {name: statistics.fmean(point[name] for point in points) for name in names}
    return means | {"em_min": min(point["em"] for point in points), "em_max": max(point["em"] for point in points)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=["grpo", "arpo"])
    parser.add_argument("--folder", type=Path, default=Path("checkpoints/branching_world"), help="folder of the runs")
    parser.add_argument("--steps", type=int, default=40, help="steps of GRPO")
    parser.add_argument("--more-steps", type=float, default=1.5, help="steps of the other methods, as a multiple")
    parser.add_argument("--interval", type=int, default=5, help="steps between evaluations")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16, help="tasks of a step")
    parser.add_argument("--num-test", type=int, default=100, help="held-out questions")
    parser.add_argument("--num-samples", type=int, default=4, help="rollouts of each held-out question")
    parser.add_argument("--set", nargs="*", default=[], dest="overrides", metavar="KEY=VALUE", help="override keys")
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    curves: dict[str, list[list[dict[str, float]]]] = {name: [] for name in arguments.methods}
    for seed in arguments.seeds:
        pipeline = build_pipeline(arguments, seed=seed)
        folder = Path(pipeline["folder"])
        folder.parent.mkdir(parents=True, exist_ok=True)
        path = folder.parent / f"seed{seed}.yaml"
        path.write_text(yaml.safe_dump(pipeline, sort_keys=False), encoding="utf-8")
        result = run_pipeline(path, overrides=arguments.overrides)
        for name in arguments.methods:
            curves[name].append(read_curve(result.stages[name].folder))
    budgets = [
        min(curves[name][index][-1]["total_tool_calls"] for name in curves) for index in range(len(curves["grpo"]))
    ]
    rows: dict[str, dict[str, Any]] = {}
    for name, runs in curves.items():
        rows[name] = {
            "start": describe([run[0] for run in runs]),
            "half": describe([find_point(run, budget / 2) for run, budget in zip(runs, budgets, strict=True)]),
            "equal": describe([find_point(run, budget) for run, budget in zip(runs, budgets, strict=True)]),
        }
    print("method          at  reward     em    min    max  calls  tool calls    tokens       s")
    for name, row in rows.items():
        for label, each in row.items():
            print(
                f"{name:13}{label:>7}{each['reward']:>8.3f}{each['em']:>7.3f}{each['em_min']:>7.3f}{each['em_max']:>7.3f}"
                f"{each['tool_calls']:>7.2f}{each['total_tool_calls']:>12.0f}{each['total_sampled_tokens']:>10.0f}"
                f"{each['total_seconds']:>8.0f}"
            )
    others = {name: row["equal"]["em"] for name, row in rows.items() if name != "grpo"}
    publish(
        name="branching_world_pocket",
        unit="exact match on held-out questions at equal tool calls; ours is the best branching method",
        ours=max(others.values()),
        peers={"grpo": rows["grpo"]["equal"]["em"]},
        device="cpu",
        details={"rows": rows, "curves": curves, "budgets": budgets, "arguments": {**vars(arguments), "folder": ""}},
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
