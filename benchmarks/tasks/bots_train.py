"""Random batches against BOTS on a real model with equal rollouts: reward variance and held-out accuracy.

First measure the pass rates of the training tasks, then build a graded set in which most tasks are too easy or too
hard, then train:

    tunesmith pass-rate run.yaml --field pass_rate --out measured.jsonl --runs 8
    python -m benchmarks.tasks.bots_train grade --measured measured.jsonl --field pass_rate --out graded/train.jsonl
    python -m benchmarks.tasks.bots_train train --config run.yaml --data graded/train.jsonl --field pass_rate --seeds 5

The run file names the workflow, the judge, the model, a held-out set and the evaluation interval. The figure is one
over the share of rollouts after which BOTS reaches the final held-out accuracy of random sampling, both as means of
three evaluations; a seed that never reaches it counts as 1. Interrupted runs are resumed. `--plot FILE` draws both
accuracies over rollouts. `compare` reads the metrics of two runs that were made elsewhere.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

from benchmarks.shared.report import publish
from benchmarks.tasks.bots import find_share
from tunesmith.commands.eval.sample_scores import compute_bootstrap_interval
from tunesmith.commands.settings import load_run_file
from tunesmith.commands.tune.tune import run_tuning
from tunesmith.compat.chat_models import choose_chat_model
from tunesmith.config import RunConfig
from tunesmith.runs.load_function import load_functions
from tunesmith.storage import load_json_lines, save_json

SHARES = {"easy": 0.45, "within reach": 0.15, "hard": 0.40}
EASY, HARD = 0.95, 0.05
"""A task is too easy at this pass rate or above, too hard at this pass rate or below."""
SELECTORS = {"random": "random", "difficulty_based": "BOTS"}
Row = dict[str, float]


def name_grade(rate: float) -> str:
    return "easy" if rate >= EASY else "hard" if rate <= HARD else "within reach"


def grade(arguments: argparse.Namespace) -> None:
    """Write as many tasks as the smallest grade allows, in the shares above, shuffled."""
    rows = load_json_lines(Path(arguments.measured))
    by_grade = {name: [row for row in rows if name_grade(row[arguments.field]) == name] for name in SHARES}
    size = int(min(len(by_grade[name]) / share for name, share in SHARES.items()))
    if not size:
        raise SystemExit(f"a grade has no task: { ({name: len(each) for name, each in by_grade.items()}) }")
    rng = random.Random(0)
    kept = [row for name, share in SHARES.items() for row in rng.sample(by_grade[name], int(size * share))]
    rng.shuffle(kept)
    out = Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), encoding="utf-8")
    print(f"{out}: {len(kept)} of {len(rows)} tasks")


def train_one(arguments: argparse.Namespace, *, selector: str, seed: int) -> list[Row]:
    """Train one run; returns a row for each held-out evaluation."""
    chosen: dict[str, Any] = {"selector_type": selector}
    if selector == "difficulty_based":
        args = {"m": 8, "lamb": 0.1, "rho": 0.1, "target_reward": 0.5, "tau": 0, "do_sample": True}
        args["prior_count"] = arguments.prior_count
        chosen |= {"feature_keys": [arguments.field], "args": args}
    overrides = [
        f"train_dataset.path={arguments.data}",
        f"train_dataset.task_selector={json.dumps(chosen)}",
        f"seed={seed}",
        f"name=bots-{selector}-{seed}",
        "evaluation.at_start=true",
        "continue_from_checkpoint=true",
        *arguments.overrides,
    ]
    config = load_run_file(arguments.config, overrides)
    workflow, judge = load_functions(config)
    result = run_tuning(
        config, workflow=workflow, judge=judge, build_model=choose_chat_model(config.rollout.chat_model)
    )
    return read_history(load_json_lines(result.folder / "metrics.jsonl"), config, metric=arguments.metric)


def read_history(lines: list[dict[str, Any]], config: RunConfig, *, metric: str) -> list[Row]:
    """A row for each held-out evaluation; training metrics are averaged over the steps since the previous one."""
    accuracy, num_tasks = (f"eval/{next(iter(config.eval_datasets))}/{name}" for name in (metric, "num_tasks"))
    trained = [line for line in lines if line["kind"] == "train"]
    shares = [line["algorithm/num_trained_groups"] / config.algorithm.batch_size for line in trained]
    rewards = [line[f"rollout/{metric}/mean"] for line in trained]
    history: list[Row] = []
    since = 0
    for line in lines:
        if line["kind"] == "eval":
            step = line["step"]
            history.append(
                {
                    "rollouts": float(step * config.algorithm.batch_size * config.algorithm.group_size),
                    "accuracy": line[accuracy],
                    **dict(zip(("low", "high"), compute_wilson(line[accuracy], line[num_tasks]), strict=True)),
                    "share_with_variance": statistics.fmean(shares[:step] or [0.0]),
                    "training_accuracy": statistics.fmean(rewards[since:step] or rewards[:1]),
                }
            )
            since = step
    return history


def compute_wilson(share: float, num_tasks: float) -> tuple[float, float]:
    """95 % interval of a proportion of independent tasks (Wilson, 1927); conservative when tasks are sampled twice."""
    z = 1.96
    middle = share + z * z / (2 * num_tasks)
    width = z * math.sqrt(share * (1 - share) / num_tasks + z * z / (4 * num_tasks**2))
    scale = 1 + z * z / num_tasks
    return (middle - width) / scale, (middle + width) / scale


def smooth_accuracy(history: list[Row]) -> list[Row]:
    """Moving average of three held-out accuracies, so that no single evaluation decides."""
    accuracies = [row["accuracy"] for row in history]
    return [
        row | {"accuracy": statistics.fmean(accuracies[max(place - 2, 0) : place + 1])}
        for place, row in enumerate(history)
    ]


def train(arguments: argparse.Namespace) -> None:
    details = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        runs = {name: train_one(arguments, selector=name, seed=seed) for name in arguments.selectors}
        if len(runs) == len(SELECTORS):
            details.append(compare_runs(runs, seed=seed))
    if details:
        publish_comparison(details, arguments)


def compare(arguments: argparse.Namespace) -> None:
    """Compare the metrics of two runs up to the last evaluation that both have reached."""
    config = load_run_file(arguments.config)
    runs = {}
    for name, path in zip(SELECTORS, arguments.metrics, strict=True):
        runs[name] = read_history(load_json_lines(Path(path)), config, metric=arguments.metric)
    reached = min(len(history) for history in runs.values())
    details = [compare_runs({name: history[:reached] for name, history in runs.items()}, seed=arguments.first_seed)]
    if arguments.plot:
        plot(details, arguments.plot)
    if arguments.out:
        save_json(Path(arguments.out), details)


def compare_runs(runs: dict[str, list[Row]], *, seed: int) -> dict[str, Any]:
    """Histories of one seed, and the share of the rollouts after which BOTS reaches random's final accuracy."""
    smooth = {name: smooth_accuracy(history) for name, history in runs.items()}
    share = find_share(smooth["difficulty_based"], smooth["random"][-1]["accuracy"])
    for name, history in runs.items():
        last = history[-1]
        print(
            f"seed {seed}  {name:<17} accuracy {history[0]['accuracy']:.3f} -> {last['accuracy']:.3f}  "
            f"groups with variance {last['share_with_variance']:.2f}"
        )
    print(f"seed {seed}  share of rollouts to random's final accuracy: {'never' if share is None else f'{share:.2f}'}")
    return {"seed": seed, "share_of_randoms_rollouts": share, "runs": runs}


def publish_comparison(details: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    if arguments.plot:
        plot(details, arguments.plot)
    found = [each["share_of_randoms_rollouts"] for each in details]
    shares = [1.0 if share is None else share for share in found]
    mean, (low, high) = statistics.fmean(shares), compute_bootstrap_interval(shares, seed=0)
    print(f"share of random's rollouts: {mean:.2f} ({low:.2f} to {high:.2f})")
    publish(
        name="bots_train", unit="random's rollouts over ours at equal accuracy", ours=1 / mean, peers={"random": 1.0},
        device=load_run_file(arguments.config).model.device,
        details={"share_of_randoms_rollouts": mean, "interval": [low, high], "seeds": details}, out=arguments.out,
    )  # fmt: skip


def plot(details: list[dict[str, Any]], path: str) -> None:
    """Plot accuracy on training and held-out tasks: the mean and range over seeds, or the 95 % interval of one seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for place, (field, title) in enumerate(
        [("training_accuracy", "accuracy on training tasks"), ("accuracy", "held-out accuracy")]
    ):
        axes = figure.add_subplot(1, 2, place + 1)
        for name, label in SELECTORS.items():
            histories = [each["runs"][name] for each in details]
            rollouts = [row["rollouts"] for row in histories[0]]
            values = [[row[field] for row in rows] for rows in zip(*histories, strict=True)]
            axes.plot(rollouts, [statistics.fmean(each) for each in values], label=label)
            if len(details) > 1:
                axes.fill_between(rollouts, [min(each) for each in values], [max(each) for each in values], alpha=0.2)
            elif field == "accuracy":
                low, high = ([row[end] for row in histories[0]] for end in ("low", "high"))
                axes.fill_between(rollouts, low, high, alpha=0.2)
        axes.set_xlabel("rollouts")
        axes.set_title(title)
        axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("grade", "train", "compare"), help="what to do")
    parser.add_argument("--measured", help="grade: JSON lines file with pass rates")
    parser.add_argument("--config", help="train: run file")
    parser.add_argument("--data", help="train: JSON lines file of graded tasks")
    parser.add_argument("--field", default="pass_rate", help="field that holds the pass rate")
    parser.add_argument(
        "--selectors", nargs="+", choices=tuple(SELECTORS), default=list(SELECTORS), help="train: selectors"
    )
    parser.add_argument("--metrics", nargs=2, help="compare: metrics.jsonl of the random run and of the BOTS run")
    parser.add_argument("--metric", default="accuracy", help="train: metric that is compared")
    parser.add_argument("--prior-count", type=float, default=8.0, help="train: rollouts behind each pass rate")
    parser.add_argument("--seeds", type=int, default=5, help="train: number of seeds")
    parser.add_argument("--first-seed", type=int, default=0, help="train: the first of them")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override a key"
    )
    parser.add_argument("--plot", help="train: PNG file to draw (needs matplotlib)")
    parser.add_argument("--out", help="grade: JSON lines file; train: JSON file of the result")
    arguments = parser.parse_args()
    {"grade": grade, "train": train, "compare": compare}[arguments.mode](arguments)


if __name__ == "__main__":
    main()
