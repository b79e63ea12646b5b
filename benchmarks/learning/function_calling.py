"""Function calls before and after training, on functions that were not trained, under one reader of calls.

    python -m benchmarks.learning.function_calling results/runs/function_calling/seed42 \\
        results/runs/function_calling/seed1 --out results/learning/function_calling.json

Each folder has the evaluations of one run of `recipes/function_calling/run.yaml` before and after training. `reward` is
what was paid then, with the reader of that day, which did not read Hermes' tags in a fence of Markdown. `reread` reads
the text of replies again with the parser of this tree, so that a gain in it is not one of format alone.
The paired tests compare tasks of the test split: McNemar's exact test over tasks, and a bootstrap over groups of tasks
that share a function. The primary categories are those of which most rows have several functions or real users' text.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from math import comb
from pathlib import Path
from typing import Any

from benchmarks.shared.report import publish
from tunesmith.chat.parsers.json_calls import JSON
from tunesmith.environments.sets.bfcl import TRAINED, Row, find_data, find_names, group_functions, load_rows
from tunesmith.environments.sets.bfcl_calls import Call, find_mistake

PRIMARY = ("live_simple", "live_multiple", "multiple")
BOOTSTRAP = 2000


def read_calls(text: str, row: Row) -> list[Call]:
    """The calls of a reply, by the names of the leaderboard's functions."""
    assert JSON.read_block is not None
    calls: list[Call] = []
    start = 0
    while places := [place for each in JSON.openers if (place := text.find(each, start)) >= 0]:
        block = JSON.read_block(text[min(places) :], row.schemas, is_end=True)
        assert block is not None
        calls += [(row.names.get(each.name, each.name), json.loads(each.arguments)) for each in block.calls]
        start = min(places) + max(block.length, 1)
    return calls


def reread(task: dict[str, Any], row: Row) -> float:
    """The reward of a task, or that of the calls in its text, if that is higher: text is what was not read as calls."""
    reward, text = task["rewards"][0], task["responses"][0]
    if reward == 1 or not text:
        return float(reward)
    calls, is_parallel = read_calls(text, row), "parallel" in row.line["id"]
    return float(not find_mistake(row.line["function"], calls, row.line["accepted"], is_parallel=is_parallel))


def compare(before: dict[str, float], after: dict[str, float], groups: dict[str, str]) -> dict[str, Any]:
    """The paired difference of two scores by task, with McNemar's p and a bootstrap interval over groups."""
    better = sum(after[each] > before[each] for each in before)
    worse = sum(after[each] < before[each] for each in before)
    tail = sum(comb(better + worse, each) for each in range(min(better, worse) + 1)) / 2 ** (better + worse)
    by_group: dict[str, list[float]] = defaultdict(list)
    for each in before:
        by_group[groups[each]].append(after[each] - before[each])
    rng, means, drawn = random.Random(0), [], list(by_group.values())
    for _ in range(BOOTSTRAP):
        sample = [value for group in rng.choices(drawn, k=len(drawn)) for value in group]
        means.append(sum(sample) / len(sample))
    means.sort()
    return {
        "tasks": len(before),
        "groups": len(drawn),
        "before": sum(before.values()) / len(before),
        "after": sum(after[each] for each in before) / len(before),
        "better": better,
        "worse": worse,
        "p": min(1.0, 2 * tail),
        "interval_95": [means[int(0.025 * BOOTSTRAP)], means[int(0.975 * BOOTSTRAP)]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--data", help="folder of bfcl-eval's data; the installed package's without it")
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    folder = find_data(arguments.data)
    rows, functions = load_rows(folder, ""), group_functions(folder)
    groups = {name: functions[find_names(row.line)[0]] for name, row in rows.items()}
    by_length = sorted(TRAINED, key=len, reverse=True)
    category = {name: next(each for each in by_length if name.startswith(each)) for name in rows}
    details: dict[str, Any] = {}
    for run in arguments.folders:
        files = sorted(run.glob("step_*.json"))
        tasks = [json.loads(file.read_text())["test"]["tasks"] for file in (files[0], files[-1])]
        evaluations = [{each["row"]["id"]: each for each in found} for found in tasks]
        names = list(evaluations[0])
        parts = {"all": names, "primary": [name for name in names if category[name] in PRIMARY]}
        parts |= {each: [name for name in names if category[name] == each] for each in TRAINED}
        scores = {
            "reward": [{name: each["rewards"][0] for name, each in found.items()} for found in evaluations],
            "reread": [{name: reread(each, rows[name]) for name, each in found.items()} for found in evaluations],
        }
        details[run.name] = {
            kind: {
                part: compare({name: before[name] for name in part_names}, after, groups)
                for part, part_names in parts.items()
            }
            for kind, (before, after) in scores.items()
        }
        for part, each in details[run.name]["reread"].items():
            low, high = each["interval_95"]
            change = f"{each['before']:7.1%} -> {each['after']:6.1%}  {low:+.1%} to {high:+.1%}  p {each['p']:.1g}"
            print(f"{run.name:8} {part:18} {each['tasks']:4} {change}")
    gains = [each["reread"]["primary"]["after"] - each["reread"]["primary"]["before"] for each in details.values()]
    publish(
        name="function_calling",
        unit="points of accuracy, primary categories, reread",
        ours=100 * sum(gains) / len(gains),
        peers={},
        device="cpu",
        details=details,
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
