"""Every algorithm recipe on the pocket model: held-out accuracy before and after training.

    tunesmith demo                                     prints its folder, checkpoints/demo/<time>-seed0
    python recipes/algorithms/prepare_data.py DEMO     writes demonstrations and preferences
    python -m benchmarks.learning.algorithms --demo DEMO --work WORK --only gspo rloo

Each recipe runs in its own process, one after another, from the demo's fine-tuned model and with the same seed.
Algorithms that train on rewards run `--steps` steps with `--scale` times the recipe's batch size; the others run their
recipe unchanged. Each result is merged into `--out` when it is done. `--set algorithm.top_entropy_fraction=0.2` trains
the recipes with other settings, whose results are named after them. An algorithm has learned when its `reward` after
training lies outside the interval before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tunesmith.storage import load_json_lines

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "algorithms"
EVALUATION = ROOT / "recipes" / "pocket" / "config.yaml"
PREFERENCES = ("dpo", "kto", "orpo", "simpo")


def run_command(arguments: list[str], *, demo: Path) -> None:
    """Run a tunesmith command from the repository root, to which recipes are relative; raise when it fails."""
    environment = os.environ | {"DEMO": str(demo)}
    subprocess.run([sys.executable, "-m", "tunesmith", *arguments], check=True, cwd=ROOT, env=environment)


def train(name: str, args: argparse.Namespace, folder: Path) -> Path:
    """Run a recipe in its own folder; return the folder of the trained model."""
    recipe = RECIPES / f"{name}.yaml"
    content = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    shutil.rmtree(folder, ignore_errors=True)
    if "workflow" not in content:
        command = "prefer" if name in PREFERENCES else "sft"
        changes = [item for setting in args.set for item in ("--set", setting)]
        run_command([command, str(recipe), "--out", str(folder), *changes], demo=args.demo)
        return folder / "model"
    overrides = {
        "checkpoint_root_dir": folder.parent,
        "project": folder.name,
        "name": "run",
        "total_steps": args.steps,
        "algorithm.batch_size": max(round(args.scale * content["algorithm"]["batch_size"]), 1),
        "evaluation.max_tasks": 1,
        "monitor.trackers": "[]",
        "monitor.log_interval_steps": 5,
    }
    given = [f"{key}={value}" for key, value in overrides.items()] + args.set
    settings = [item for setting in given for item in ("--set", setting)]
    run_command(["tune", str(recipe), *settings], demo=args.demo)
    return folder / "run" / f"global_step_{args.steps}"


def evaluate(model: Path, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Mean reward on the held-out problems with its 95 % interval, with the same seeds for every model.

    A result that is already in the folder is reused.
    """
    if not (folder / "comparison.json").exists():
        settings = ["--set", f"evaluation.max_tasks={args.tasks}", "--set", f"model.path={model}", "--out", str(folder)]
        run_command(["eval", str(EVALUATION), "--model", f"model={model}", *settings], demo=args.demo)
    found = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    (result,) = next(iter(found.values()))["models"].values()
    reward = result["estimates"]["reward"]
    return {
        "reward": reward["mean"],
        "interval": reward["interval"],
        "num_tasks": result["num_tasks"],
        "num_failures": result["num_failures"],
    }


def read_progress(folder: Path) -> dict[str, Any]:
    """Mean rewards of the training rollouts of each step."""
    path = folder / "run" / "metrics.jsonl"
    if not path.exists():
        return {}
    rows = load_json_lines(path)
    rewards = [round(row["rollout/reward_mean"], 3) for row in rows if row["kind"] == "train"]
    return {"num_steps": len(rewards), "training_rewards": rewards}


def save_row(path: Path, name: str, row: dict[str, Any]) -> None:
    """Merge the row into the JSON file."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in sorted((rows | {name: row}).items())]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, required=True, help="output folder of tunesmith demo")
    parser.add_argument("--work", type=Path, required=True, help="folder for the runs; existing ones are replaced")
    parser.add_argument("--only", nargs="*", help="names of recipes; default: all")
    parser.add_argument("--set", nargs="*", default=[], help="settings, as KEY=VALUE, that differ from the recipes'")
    parser.add_argument("--steps", type=int, default=20, help="steps of algorithms that train on rewards")
    parser.add_argument("--scale", type=float, default=0.5, help="factor on their batch size")
    parser.add_argument("--tasks", type=int, default=200, help="number of held-out problems")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "results" / "learning" / "algorithms_pocket.json", help="JSON file"
    )
    args = parser.parse_args()
    args.demo, args.work = args.demo.absolute(), args.work.absolute()
    return args


def main() -> None:
    args = parse_arguments()
    names = args.only or sorted(path.stem for path in RECIPES.glob("*.yaml"))
    before = evaluate(args.demo / "sft" / "model", args, args.work / f"before-{args.tasks}")
    failed = []
    for name in names:
        label = " ".join([name, *args.set])
        folder, results = args.work / label.replace(" ", "-"), args.work / f"{label.replace(' ', '-')}-eval"
        shutil.rmtree(results, ignore_errors=True)
        started = time.perf_counter()
        try:
            model = train(name, args, folder)
            seconds = time.perf_counter() - started
            after = evaluate(model, args, results)
        except subprocess.CalledProcessError as error:
            print(f"{name}: {error}")
            failed.append(name)
            continue
        row = {"before": before, "after": after, "train_seconds": round(seconds, 1)} | read_progress(folder)
        save_row(args.out, label, row)
        print(f"{label}: {before['reward']:.3f} -> {after['reward']:.3f} {after['interval']}", flush=True)
    if failed:
        sys.exit(f"these failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
