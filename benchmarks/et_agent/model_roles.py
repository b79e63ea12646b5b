"""Runs of `recipes/et_agent/mathematics.yaml` or `world.yaml`: accuracy by comparison of the answers, and what the
flywheel's operators made.

Accuracy is math_equal (mathematics) or em (the world) over all rollouts. Means are over questions, intervals 95 %
percentile bootstrap intervals, differences paired by question. Those of all seeds are over the questions of all of
them, and a question that several seeds have counts once, with its mean. Right trajectories of an operator are compared
with their parents by the number of tool calls. With `--votes`, where a model judges the flywheel, its verdicts are
compared with math_equal.

    python -m benchmarks.et_agent.model_roles results/et_agent/mathematics/seed? --out FILE
    python -m benchmarks.et_agent.model_roles results/et_agent/mathematics/votes? --votes
    python -m benchmarks.et_agent.model_roles results/et_agent/world/seed? --measure em --out FILE

The folders are those of the pipelines; files may be compressed (`.xz`), and parts that are missing are left out.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
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
    ("rft", "rft_unwritten"),
    ("rft_rollouts", "rft_unwritten"),
    ("rft", "rft_masked"),
    ("rft", "rft_dropped"),
    ("rft", "rft_expert"),
    ("rft_rollouts", "rft_expert"),
    ("rft_expert", "rl"),
)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in (read_text(path) or "").splitlines())


Accuracies = dict[str, dict[str, dict[str, float]]]
"""The share of right rollouts of each question, by test set and model."""


def read_accuracies(folder: Path, measure: str) -> Accuracies:
    accuracies: Accuracies = defaultdict(dict)
    for stage in ("eval", "eval_arms", "eval_further"):
        for test_set, compared in json.loads(read_text(folder / stage / "comparison.json") or "{}").items():
            for name, model in compared["models"].items():
                accuracies[test_set].setdefault(
                    name,
                    {
                        task["row"]["question"]: fmean(each["metrics"].get(measure, 0.0) for each in task["attempts"])
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
            name: average_by_question([each[test_set][name] for each in seeds])
            for name in models
            if all(name in each.get(test_set, {}) for each in seeds)
        }
        for test_set, models in seeds[0].items()
    }


def average_by_question(seeds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for each in seeds:
        for question, value in each.items():
            values[question].append(value)
    return {question: fmean(each) for question, each in values.items()}


def compare(accuracies: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    return {
        "accuracy": {name: describe(list(each.values())) for name, each in accuracies.items()},
        "differences": {
            f"{low} -> {high}": describe([accuracies[high][key] - value for key, value in accuracies[low].items()])
            for low, high in COMPARISONS
            if low in accuracies and high in accuracies
        },
    }


BEHAVIOR = (
    "efficiency", "conciseness", "successful_execution", "reasoning_length", "tool_calls", "sampled_tokens", "answered",
)  # fmt: skip
THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
Behavior = dict[str, dict[str, dict[str, float]]]
"""Means of the measures of behavior, by test set and model."""


def read_behavior(folder: Path) -> Behavior:
    behavior: Behavior = defaultdict(dict)
    for stage in ("eval", "eval_arms"):
        for test_set, compared in json.loads(read_text(folder / stage / "comparison.json") or "{}").items():
            for name, model in compared["models"].items():
                estimates = {each: model["estimates"][each]["mean"] for each in BEHAVIOR if each in model["estimates"]}
                texts = [attempt["response"] or "" for task in model["tasks"] for attempt in task["attempts"]]
                letters = [sum(map(str.isalnum, thought)) for text in texts for thought in THOUGHT.findall(text)]
                estimates |= {"letters_a_thought": fmean(letters)} if letters else {}
                behavior[test_set].setdefault(name, estimates)
    return behavior


def average_behavior(seeds: Sequence[Behavior]) -> Behavior:
    """Means over the seeds that have a model and a measure."""
    values: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    for test_set, models in (item for seed in seeds for item in seed.items()):
        for name, measures in models.items():
            for measure, mean in measures.items():
                values[test_set, name, measure].append(mean)
    averaged: Behavior = defaultdict(lambda: defaultdict(dict))
    for (test_set, name, measure), means in values.items():
        averaged[test_set][name][measure] = fmean(means)
    return averaged


def average_pass_rates(folder: Path) -> dict[str, float]:
    """The mean pass rate of the training questions before each round."""
    rates = {}
    for file in sorted({path.parent for path in folder.glob("*pass_rate_*/tasks.jsonl*")}):
        rates[file.name] = fmean(row["pass_rate"] for row in read_rows(file / "tasks.jsonl"))
    return rates


CORRECT_AT = 0.75


def count_operators(folder: Path, stage: str) -> dict[str, dict[str, int]]:
    """Attempts of each operator of a flywheel, its right trajectories, and how many of these call more, as often or
    less often than the trajectory that they were made of."""
    rows = [row for row in read_rows(folder / stage / "attempts.jsonl") if "outcome" in row]
    kept = {(row["question_id"], row["number"]): row for row in rows if row["outcome"] == "kept"}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        counts[row["operator"]]["attempts"] += 1
    for row in kept.values():
        count, parent = counts[row["operator"]], kept.get((row["question_id"], row["parent"]))
        if row["correctness"] is None or row["correctness"] < CORRECT_AT:
            continue
        count["right"] += 1
        if parent is not None:
            difference = count_calls(row) - count_calls(parent)
            count["more calls" if difference > 0 else "fewer calls" if difference else "as many calls"] += 1
    return {name: dict(count) for name, count in counts.items()}


def count_calls(row: Mapping[str, Any]) -> int:
    return sum(each["kind"] == "call" for each in row["transcript"]["segments"])


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
    parser.add_argument("--measure", default="math_equal", help="metric that is the accuracy")
    parser.add_argument("--votes", action="store_true", help="count the verdicts of a model as judge, in mathematics")
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    details: dict[str, Any] = {}
    read = {folder.name: read_accuracies(folder, arguments.measure) for folder in arguments.folders}
    if len(evaluated := [each for each in read.values() if each]) > 1:
        read["all seeds"] = merge(evaluated)
    for seed, test_sets in read.items():
        details[seed] = {test_set: compare(accuracies) for test_set, accuracies in test_sets.items()}
        for test_set, figures in details[seed].items():
            for name, each in (figures["accuracy"] | figures["differences"]).items():
                low, high = each["interval"]
                print(f"{seed:9} {test_set:8} {name:28} {each['mean']:+.3f} ({low:+.3f} to {high:+.3f})")
    behavior = {folder.name: read_behavior(folder) for folder in arguments.folders}
    for seed, found in (behavior | {"all seeds": average_behavior(list(behavior.values()))}).items():
        details.setdefault(seed, {})["behavior"] = found
        for test_set, models in found.items():
            for name, measures in models.items():
                shown = "  ".join(f"{what} {value:.3g}" for what, value in measures.items())
                print(f"{seed:9} {test_set:8} {name:14} {shown}")
    for folder in arguments.folders:
        details[folder.name]["pass rates"] = rates = average_pass_rates(folder)
        print(f"{folder.name:9} " + "  ".join(f"{name} {rate:.3f}" for name, rate in rates.items()))
    for folder, stage in product(arguments.folders, ("flywheel", "flywheel_expert")):
        if operators := count_operators(folder, stage):
            details[folder.name]["operators" if stage == "flywheel" else "operators of the expert"] = operators
        for name, counts in operators.items():
            print(f"{folder.name:9} {stage} {name:20} " + "  ".join(f"{what} {each}" for what, each in counts.items()))
    for folder in arguments.folders if arguments.votes else ():
        details[folder.name]["verdicts"] = verdicts = count_verdicts(folder)
        for said, counts in verdicts.items():
            right, wrong = counts.get("right", 0), counts.get("wrong", 0)
            print(f"{folder.name:9} judge: {said:20} right {right:5}   wrong {wrong:5}")
    last = next(each["test"]["accuracy"] for each in reversed(details.values()) if "test" in each)
    publish(
        name=f"et_agent_{arguments.folders[0].parent.name}", unit="accuracy of the last model on the set `test`",
        ours=list(last.values())[-1]["mean"], peers={}, device="cpu", details=details, out=arguments.out,
    )  # fmt: skip


if __name__ == "__main__":
    main()
