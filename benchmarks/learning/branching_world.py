"""GRPO, ARPO and the efficiency reward: a search agent on the questions of a fictional world, pocket model, CPU.

Each seed runs the stages of recipes/tool_agent/search_agent.yaml up to SFT, then reinforcement learning from the same
fine-tuned model with each method, with the same number of rollouts a step. Held-out questions, about entities that no
training question has, are evaluated at intervals.

- grpo: GRPO with the judge's reward (token F1), which is correctness alone.
- arpo: the same with branching rollouts. A step makes fewer tool calls, so there are more steps.
- efficiency: GRPO with the reward for few calls and short thoughts, with small sigmas that decay to 0.
- collapse: the same with a large sigma that stays.

The first table compares grpo and arpo where their total number of executed tool calls is equal (calls that a branch
inherits are not executed again), and the calls after which each first reached given accuracies. The second compares
the last evaluation of each other method with that of grpo. Every run is a process of its own with one thread:

    python -m benchmarks.learning.branching_world --seeds 0 1 2 --jobs 12 \\
        --out results/learning/branching/world_pocket.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from benchmarks.shared.report import publish
from tunesmith.commands.eval.sample_scores import compare_paired

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "tool_agent" / "search_agent.yaml"
SHARED = ("world", "pretraining", "base", "pretrained", "habits", "sft")
"""Stages before reinforcement learning."""


def build_efficiency(**sigmas: Any) -> dict[str, Any]:
    return {"experience": {"operators": [{"name": "efficiency_reward", "args": {"format_key": "format", **sigmas}}]}}


METHODS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "arpo": {"rollout": {"branching": {"credit": "soft"}}},
    "arpo_hard": {"rollout": {"branching": {"credit": "hard"}}},
    "aepo_rollout": {"rollout": {"branching": {"dynamic_budget_slope": 1.0, "consecutive_penalty": 0.2}}},
    "efficiency": build_efficiency(sigma_tool=0.2, sigma_length=0.1),
    "collapse": build_efficiency(sigma_tool=4.0, sigma_length=0.1, decay="none"),
}
"""Method -> sections of its run."""
BRANCHING = ("arpo", "arpo_hard", "aepo_rollout")
FIGURES = ("reward", "reward_low", "reward_high", "em", "tool_calls", "format")
LEVELS = [round(0.05 * number, 2) for number in range(1, 20)]
"""Accuracies whose first reaching is looked for."""


def build_shared(arguments: argparse.Namespace, *, seed: int) -> dict[str, Any]:
    """The recipe without its reinforcement learning and its comparison."""
    pipeline = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    pipeline["folder"] = str((arguments.folder / f"seed{seed}").absolute())
    pipeline["variables"]["seed"] = seed
    pipeline["variables"]["world"]["num_test"] = arguments.num_test
    return pipeline | {"stages": {name: pipeline["stages"][name] for name in SHARED}}


def build_method(arguments: argparse.Namespace, *, seed: int, name: str) -> dict[str, Any]:
    """The shared stages, done by then, and the reinforcement learning of one method."""
    pipeline = build_shared(arguments, seed=seed)
    pipeline["folder"] += f"_{name}"
    common = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))["stages"]["rl"]
    num_steps = round(arguments.steps * arguments.more_steps) if name in BRANCHING else arguments.steps
    sizes = {"group_size": arguments.group_size, "batch_size": arguments.batch_size}
    pipeline["stages"]["rl"] = {
        **common,
        "total_steps": num_steps,
        "save_interval_steps": num_steps,
        "algorithm": {**common["algorithm"], **sizes},
        "trainer": {**common["trainer"], "schedule": "constant", "min_lr_ratio": 0.0},
        "experience": {},
        **METHODS[name],
        "eval_datasets": {"test": {"path": "stage:world/test.jsonl"}},
        "evaluation": {"interval_steps": arguments.interval, "at_start": True, "num_samples": arguments.num_samples},
        "monitor": {"log_interval_steps": arguments.interval, "has_progress": False},
    }
    return pipeline


def run_pipeline(pipeline: Mapping[str, Any], arguments: argparse.Namespace) -> float:
    """Run a pipeline in a process of one thread, at most until the deadline; returns its seconds."""
    folder = Path(pipeline["folder"])
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.parent / f"{folder.name}.yaml"
    path.write_text(yaml.safe_dump(dict(pipeline), sort_keys=False), encoding="utf-8")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, "-m", "tunesmith", "run", str(path)]
    command += [argument for override in arguments.overrides for argument in ("--set", override)]
    started = time.perf_counter()
    with path.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(timeout=max(1.0, arguments.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = 0
            print(f"{folder.name}: stopped at the deadline", flush=True)
    if code:
        raise RuntimeError(f"{path} failed:\n{path.with_suffix('.log').read_text()[-3000:]}")
    seconds = time.perf_counter() - started
    print(f"{folder.name}: {seconds:.0f} s", flush=True)
    return seconds


def run_all(arguments: argparse.Namespace) -> dict[str, float]:
    """All seeds, then all their methods, `jobs` processes at a time; returns the seconds of each process."""
    with ThreadPoolExecutor(arguments.jobs) as pool:
        shared = [build_shared(arguments, seed=seed) for seed in arguments.seeds]
        seconds = list(pool.map(lambda each: run_pipeline(each, arguments), shared))
        runs = []
        for name in sorted(arguments.methods, key=lambda each: each not in BRANCHING):  # the longest ones first
            for done in shared:
                seed = done["variables"]["seed"]
                runs.append(build_method(arguments, seed=seed, name=name))
                if not Path(runs[-1]["folder"]).exists():
                    shutil.copytree(done["folder"], runs[-1]["folder"], ignore=shutil.ignore_patterns("run.lock"))
        seconds += pool.map(lambda each: run_pipeline(each, arguments), runs)
    return {Path(each["folder"]).name: round(used) for each, used in zip([*shared, *runs], seconds, strict=True)}


def read_curve(run: Path) -> list[dict[str, float]]:
    """Held-out figures of each evaluation, with what the training steps before it made in total."""
    totals = dict.fromkeys(("total_tool_calls", "total_sampled_tokens", "total_seconds"), 0.0)
    points = []
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    for line in map(json.loads, text[: text.rfind("\n")].splitlines()):  # a run that was killed may end within a line
        if line["kind"] == "train":
            num_scored = line["rollout/num_trajectories"] - line["rollout/num_failed"]
            inherited = line.get("rollout/num_inherited_tool_calls", 0.0)
            totals["total_tool_calls"] += line["rollout/tool_calls/mean"] * num_scored - inherited
            totals["total_sampled_tokens"] += line["engine/num_sampled_tokens"]
            totals["total_seconds"] += line["perf/step_s"]
        elif line["kind"] == "eval":
            figures = {name: line[f"eval/test/{name}"] for name in FIGURES}
            points.append({"step": line["step"], **totals, **figures})
    return points


def read_task_rewards(run: Path, step: float) -> list[float]:
    """The mean reward of each held-out question at a step."""
    found = json.loads((run / "eval" / f"step_{int(step):06d}.json").read_text(encoding="utf-8"))
    return [statistics.fmean(task["rewards"]) for task in found["test"]["tasks"]]


def find_point(curve: list[dict[str, float]], budget: float) -> dict[str, float]:
    """The last evaluation within a budget of tool calls."""
    return [point for point in curve if point["total_tool_calls"] <= budget][-1]


def find_calls(curve: list[dict[str, float]], level: float) -> float | None:
    """Tool calls before the first evaluation whose exact match reaches a level."""
    return next((point["total_tool_calls"] for point in curve if point["em"] >= level), None)


def describe(points: list[dict[str, float]]) -> dict[str, float]:
    """Means over seeds, and the range of the accuracy."""
    means = {name: statistics.fmean(point[name] for point in points) for name in points[0]}
    return means | {"em_min": min(point["em"] for point in points), "em_max": max(point["em"] for point in points)}


def compare_calls(curves: Mapping[str, list[list[dict[str, float]]]], names: list[str]) -> dict[str, Any]:
    """Methods at half and all of the calls that all of them made, and the calls until each level, by seed."""
    seeds = range(len(curves[names[0]]))
    budgets = [min(curves[name][seed][-1]["total_tool_calls"] for name in names) for seed in seeds]
    levels = {
        name: {str(level): [find_calls(curves[name][seed], level) for seed in seeds] for level in LEVELS}
        for name in names
    }
    rows = {
        name: {
            "start": describe([curve[0] for curve in curves[name]]),
            "half": describe([find_point(curves[name][seed], budgets[seed] / 2) for seed in seeds]),
            "equal": describe([find_point(curves[name][seed], budgets[seed]) for seed in seeds]),
        }
        for name in names
    }
    return {"budgets": budgets, "rows": rows, "calls_until": levels}


def compare_last(folders: Mapping[str, list[Path]], curves: Mapping[str, list[list[dict[str, float]]]]) -> Any:
    """The last evaluation of each method, and paired differences of F1 from grpo over questions of all seeds.

    Methods that do not branch are compared at the last step that all of them reached.
    """
    plain = [each for name, each in curves.items() if name not in BRANCHING]
    steps = [min(runs[seed][-1]["step"] for runs in plain) for seed in range(len(plain[0]))]
    last = {
        name: [
            curve[-1] if name in BRANCHING else next(point for point in curve if point["step"] == step)
            for curve, step in zip(runs, steps, strict=True)
        ]
        for name, runs in curves.items()
    }
    rewards = {
        name: [
            reward
            for run, point in zip(runs, last[name], strict=True)
            for reward in read_task_rewards(run, point["step"])
        ]
        for name, runs in folders.items()
    }
    rows = {}
    for name in folders:
        difference = compare_paired(rewards["grpo"], rewards[name], seed=0)
        rows[name] = describe(last[name]) | {
            "calls_by_seed": [point["tool_calls"] for point in last[name]],
            "em_by_seed": [point["em"] for point in last[name]],
            "difference": difference.mean,
            "difference_low": difference.interval[0],
            "difference_high": difference.interval[1],
        }
    return rows


def print_tables(calls: Mapping[str, Any] | None, last: Mapping[str, Any]) -> None:
    if calls is not None:
        print("method          at  reward     em    min    max  calls  tool calls    tokens       s")
        for name, row in calls["rows"].items():
            for label, each in row.items():
                print(
                    f"{name:13}{label:>7}{each['reward']:>8.3f}{each['em']:>7.3f}{each['em_min']:>7.3f}"
                    f"{each['em_max']:>7.3f}{each['tool_calls']:>7.2f}{each['total_tool_calls']:>12.0f}"
                    f"{each['total_sampled_tokens']:>10.0f}{each['total_seconds']:>8.0f}"
                )
        for level in map(str, LEVELS):
            found = {name: each[level] for name, each in calls["calls_until"].items()}
            if any(value is not None for values in found.values() for value in values):
                print(f"calls until EM {level}: {found}")
    print("method            F1     em  calls  format  F1 - grpo (95 %)")
    for name, row in last.items():
        print(
            f"{name:13}{row['reward']:>7.3f}{row['em']:>7.3f}{row['tool_calls']:>7.2f}{row['format']:>8.2f}"
            f"{row['difference']:>+9.3f} ({row['difference_low']:+.3f} to {row['difference_high']:+.3f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=["grpo", "arpo"])
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time; each uses one core")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints/branching_world"), help="folder of the runs")
    parser.add_argument(
        "--minutes", type=float, default=600.0, help="stop all runs then; tables of what they have done"
    )
    parser.add_argument("--steps", type=int, default=30, help="steps of methods that do not branch")
    parser.add_argument("--more-steps", type=float, default=1.5, help="steps of branching methods, as a multiple")
    parser.add_argument("--interval", type=int, default=5, help="steps between evaluations")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16, help="tasks of a step")
    parser.add_argument("--num-test", type=int, default=100, help="held-out questions")
    parser.add_argument("--num-samples", type=int, default=2, help="rollouts of each held-out question")
    parser.add_argument("--set", nargs="*", default=[], dest="overrides", metavar="KEY=VALUE", help="override keys")
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    if "grpo" not in arguments.methods:
        parser.error("--methods must include grpo, which the others are compared with")
    arguments.deadline = time.monotonic() + 60 * arguments.minutes
    seconds = run_all(arguments)
    folders = {
        name: [arguments.folder / f"seed{seed}_{name}" / "rl" for seed in arguments.seeds] for name in arguments.methods
    }
    curves = {name: [read_curve(run) for run in runs] for name, runs in folders.items()}
    branching = [name for name in arguments.methods if name in BRANCHING]
    calls = compare_calls(curves, ["grpo", *branching]) if branching else None
    last = compare_last(folders, curves)
    print_tables(calls, last)
    ems = {name: row["em"] for name, row in last.items()}
    if calls is not None:
        ems |= {name: row["equal"]["em"] for name, row in calls["rows"].items()}
    others = {name: em for name, em in ems.items() if name != "grpo"}
    publish(
        name="branching_world_pocket",
        unit="held-out exact match, branching methods and grpo at equal tool calls; ours is the best of the others",
        ours=max(others.values(), default=ems["grpo"]),
        peers={"grpo": ems["grpo"]},
        device="cpu",
        details={
            "calls": calls,
            "last": last,
            "curves": curves,
            "seconds": seconds,
            "arguments": {**vars(arguments), "folder": "", "deadline": None},
        },
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
