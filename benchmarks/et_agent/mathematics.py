"""A run of `recipes/et_agent/mathematics.yaml`: accuracy by comparison of the answers, and how right its judge was.

Accuracy is math_equal over all rollouts: where the model that judges the rest gave no verdict, the answer is known not
to be equal. Means are over questions, intervals 95 % percentile bootstrap intervals, differences paired by question.
Those of all seeds are over the questions of all of them. The judge's table counts the flywheel's trajectories and the
rows of its filter by math-verify.

    python -m benchmarks.et_agent.mathematics results/et_agent/mathematics/seed0 --out results/et_agent/mathematics.json

The folder is that of the pipeline; files may be compressed (`.xz`), and parts that are missing are left out.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.shared.report import publish, read_text
from tunesmith.commands.eval.sample_scores import compute_bootstrap_interval
from tunesmith.judges.tir import score_math

COMPARISONS = (
    ("base", "rft_rollouts"),
    ("rft_rollouts", "rft"),
    ("rft", "rl"),
    ("rft_rollouts", "rl"),
    ("rl_random", "rl"),
    ("rft", "rft_masked"),
    ("rft", "rft_dropped"),
)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in (read_text(path) or "").splitlines())


Accuracies = dict[str, dict[str, dict[str, float]]]
"""The share of right rollouts of each question, by test set and model."""


def read_accuracies(folder: Path) -> Accuracies:
    accuracies: Accuracies = defaultdict(dict)
    for stage in ("eval", "eval_arms"):
        for test_set, compared in json.loads(read_text(folder / stage / "comparison.json") or "{}").items():
            for name, model in compared["models"].items():
                accuracies[test_set].setdefault(
                    name,
                    {
                        f"{folder.name}/{task['task_id']}": fmean(
                            each["metrics"].get("math_equal", 0.0) for each in task["attempts"]
                        )
                        for task in model["tasks"]
                    },
                )
    return accuracies


def describe(values: Sequence[float]) -> dict[str, Any]:
    return {"mean": fmean(values), "interval": list(compute_bootstrap_interval(values, seed=0))}


def merge(seeds: Sequence[Accuracies]) -> Accuracies:
    """The questions of all seeds, of the models that all seeds have."""
    return {
        test_set: {
            name: {task: value for each in seeds for task, value in each[test_set][name].items()}
            for name in models
            if all(name in each.get(test_set, {}) for each in seeds)
        }
        for test_set, models in seeds[0].items()
    }


def compare(accuracies: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    return {
        "accuracy": {name: describe(list(each.values())) for name, each in accuracies.items()},
        "differences": {
            f"{low} -> {high}": describe([accuracies[high][key] - value for key, value in accuracies[low].items()])
            for low, high in COMPARISONS
            if low in accuracies and high in accuracies
        },
    }


def is_right(transcript: Mapping[str, Any], answers: Mapping[str, str]) -> bool:
    said = [each["text"] for each in transcript["segments"] if each["kind"] == "answer"]
    return bool(said) and score_math(said[-1], [answers[transcript["question"]]]) == 1.0


def count_verdicts(folder: Path) -> dict[str, dict[str, int]]:
    """Right and wrong trajectories by what the judge said of them, and in the rows that are fine-tuned on."""
    answers = {row["question"]: str(row["answer"]) for row in read_rows(folder / "questions" / "train.jsonl")}
    counts = {name: Counter[str]() for name in ("right", "wrong", "no verdict", "rows of the filter")}
    for row in read_rows(folder / "flywheel" / "attempts.jsonl"):
        if row.get("transcript") and row["outcome"] in ("kept", "unscored"):
            said = {None: "no verdict", 1.0: "right", 0.0: "wrong"}[row["correctness"]]
            counts[said]["right" if is_right(row["transcript"], answers) else "wrong"] += 1
    for row in read_rows(folder / "rft_filter" / "transcripts.jsonl"):
        transcript = row.get("transcript", row)
        counts["rows of the filter"]["right" if is_right(transcript, answers) else "wrong"] += 1
    return {name: dict(each) for name, each in counts.items() if each}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="folders of pipelines, one a seed")
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    details: dict[str, Any] = {}
    read = {folder.name: read_accuracies(folder) for folder in arguments.folders}
    if len(evaluated := [each for each in read.values() if each]) > 1:
        read["all seeds"] = merge(evaluated)
    for seed, test_sets in read.items():
        details[seed] = {test_set: compare(accuracies) for test_set, accuracies in test_sets.items()}
        for test_set, figures in details[seed].items():
            for name, each in (figures["accuracy"] | figures["differences"]).items():
                low, high = each["interval"]
                print(f"{seed:9} {test_set:8} {name:28} {each['mean']:+.3f} ({low:+.3f} to {high:+.3f})")
    for folder in arguments.folders:
        details[folder.name]["verdicts"] = verdicts = count_verdicts(folder)
        for said, counts in verdicts.items():
            right, wrong = counts.get("right", 0), counts.get("wrong", 0)
            print(f"{folder.name:9} judge: {said:20} right {right:5}   wrong {wrong:5}")
    last = next(each["test"]["accuracy"] for each in reversed(details.values()) if "test" in each)
    publish(
        name="et_agent_mathematics", unit="accuracy after RL", ours=last["rl"]["mean"], peers={}, device="cpu",
        details=details, out=arguments.out,
    )  # fmt: skip


if __name__ == "__main__":
    main()
