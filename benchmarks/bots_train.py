"""Random batches against BOTS on a real model at equal rollouts: variance to learn from, and held-out accuracy.

First measure the model on the training tasks, then keep a graded set, most of it too easy or too hard, then train:

    tunesmith pass-rate run.yaml --field pass_rate --out measured.jsonl --runs 8
    python benchmarks/bots_train.py grade --measured measured.jsonl --field pass_rate --out graded/train.jsonl
    python benchmarks/bots_train.py train --config run.yaml --data graded/train.jsonl --field pass_rate --seeds 5

The run file names the agent, the judge, the model, a held-out set and how often it is tried. The figure is
one over the share of random's rollouts after which BOTS has random's final held-out accuracy; a seed that never gets
there counts as all of them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path

from bots import find_share
from report import publish

from tunesmith.api import choose_chat_model, load_functions, load_run_file
from tunesmith.pipeline.tune import run_tuning

SHARES = {"easy": 0.45, "within reach": 0.15, "hard": 0.40}
EASY, HARD = 0.95, 0.05
"""Pass rates from which a task is too easy, or up to which it is too hard."""
Row = dict[str, float]


def name_grade(rate: float) -> str:
    return "easy" if rate >= EASY else "hard" if rate <= HARD else "within reach"


def grade(arguments: argparse.Namespace) -> None:
    """As many tasks as the scarcest grade allows, in the shares above, shuffled."""
    rows = [json.loads(line) for line in Path(arguments.measured).read_text(encoding="utf-8").splitlines()]
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
    """One run; a row for each held-out evaluation."""
    chosen = {"selector_type": selector}
    if selector == "difficulty_based":
        args = {"m": 8, "lamb": 0.1, "rho": 0.1, "target_reward": 0.5, "tau": 0, "do_sample": True}
        chosen |= {"feature_keys": [arguments.field], "args": args}
    overrides = [
        f"train_dataset.path={arguments.data}",
        f"train_dataset.task_selector={json.dumps(chosen)}",
        f"seed={seed}",
        f"name=bots-{selector}-{seed}",
        "evaluation.at_start=true",
        *arguments.overrides,
    ]
    config = load_run_file(arguments.config, overrides)
    workflow, judge = load_functions(config)
    result = run_tuning(config, workflow=workflow, judge=judge, build_model=choose_chat_model(config))
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    shares = [
        row["algorithm/num_trained_groups"] / config.algorithm.batch_size for row in rows if row["kind"] == "train"
    ]
    reward = f"eval/{next(iter(config.eval_datasets))}/reward"
    per_step = config.algorithm.batch_size * config.algorithm.group_size
    return [
        {
            "rollouts": float(row["step"] * per_step),
            "accuracy": row[reward],
            "share_with_variance": statistics.fmean(shares[: row["step"]] or [0.0]),
        }
        for row in rows
        if row["kind"] == "eval"
    ]


def train(arguments: argparse.Namespace) -> None:
    details = []
    for seed in range(arguments.seeds):
        runs = {name: train_one(arguments, selector=name, seed=seed) for name in ("random", "difficulty_based")}
        share = find_share(runs["difficulty_based"], runs["random"][-1]["accuracy"])
        details.append({"seed": seed, "share_of_randoms_rollouts": share, "runs": runs})
        for name, history in runs.items():
            last = history[-1]
            print(
                f"seed {seed}  {name:<17} accuracy {history[0]['accuracy']:.3f} -> {last['accuracy']:.3f}  "
                f"groups with variance {last['share_with_variance']:.2f}"
            )
        print(
            f"seed {seed}  share of the rollouts for random's accuracy: {'never' if share is None else f'{share:.2f}'}"
        )
    found = [each["share_of_randoms_rollouts"] for each in details]
    shares = [1.0 if share is None else share for share in found]
    publish(
        name="bots_train", unit="random's rollouts over ours at equal accuracy", ours=1 / statistics.fmean(shares),
        peers={"random": 1.0}, device=load_run_file(arguments.config).model.device, details=details, out=arguments.out,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("grade", "train"))
    parser.add_argument("--measured", help="grade: rows with pass rates")
    parser.add_argument("--config", help="train: run file")
    parser.add_argument("--data", help="train: graded rows")
    parser.add_argument("--field", default="pass_rate", help="field with the pass rate")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", help="grade: jsonl file; train: JSON file of the result")
    arguments = parser.parse_args()
    {"grade": grade, "train": train}[arguments.mode](arguments)


if __name__ == "__main__":
    main()
