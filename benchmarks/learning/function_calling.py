"""Function calls before and after training, on functions that were not trained, under one reader of calls.

    python -m benchmarks.learning.function_calling results/runs/function_calling \\
        --out results/learning/function_calling.json

The folder has an evaluation of the untrained model, `base`, and of arms `NAME-SEED`, as `function_calling_arms` keeps
them: `step_*.json` of a run, or `comparison.json` of an evaluation. The text of every reply is read with the same
parser and judged by the leaderboard's rules, whatever the arm was paid for. Of a run, the last evaluation counts, or
with validation tasks the one with the best reward on them.

The primary categories are those of which most rows have several functions or real users' text. `unseen` are primary
tasks of which every offered function, those that the task does not need too, is in no training task. `no_call` are the
questions that no offered function answers; text of a call of an invented function is a call there. The content of calls
is compared apart from their form on the tasks that had a readable call before and have one after.
Paired comparisons are by task: McNemar's exact test for one seed, and bootstrap intervals over groups of tasks that
share a function, for the mean of the seeds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.shared.report import publish
from tunesmith.chat.parsers.json_calls import JSON
from tunesmith.environments.sets.bfcl import (
    TRAINED,
    Row,
    find_data,
    find_names,
    group_functions,
    is_attempt,
    load_rows,
    split_irrelevance,
)
from tunesmith.environments.sets.bfcl_calls import Call, find_mistake
from tunesmith.storage import load_json_lines

PRIMARY = ("live_simple", "live_multiple", "multiple")
NO_CALL = ("irrelevance", "live_irrelevance")
COMPARED = ("primary", "all", "no_call", "unseen", "test")
"""Parts of the test tasks, all of which are `test`, that are compared in pairs."""
BOOTSTRAP = 2000
BASE = "base"
NUM_EXAMPLES, MAX_ACCEPTED = 10, 400


@dataclass(frozen=True)
class Answer:
    """A reply to a test task, as read here."""

    paid: float
    """What the evaluation paid."""
    text: str
    num_tokens: int
    calls: Sequence[Call]
    is_right: bool
    has_right_names: bool


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


def judge(text: str, num_tokens: int, paid: float, row: Row) -> Answer:
    calls, line = read_calls(text, row), row.line
    if "accepted" not in line:
        is_silent = not calls and not is_attempt(text, row)
        return Answer(paid, text, num_tokens, calls, is_silent, is_silent)
    is_parallel = "parallel" in line["id"]
    names = sorted(name for name, _ in calls) == sorted(find_names(line))
    is_right = not find_mistake(line["function"], calls, line["accepted"], is_parallel=is_parallel)
    return Answer(paid, text, num_tokens, calls, is_right, names)


def load_answers(folder: Path, rows: Mapping[str, Row]) -> dict[int, dict[str, Answer]]:
    """Step -> answers by task; an evaluation without steps has the step 0."""
    found: dict[int, dict[str, Answer]] = {}
    if (compared := folder / "comparison.json").is_file():
        (model,) = json.loads(compared.read_text())["test"]["models"].values()
        tasks = [(each["row"]["id"], each["attempts"][0]) for each in model["tasks"]]
        found[0] = {
            name: judge(each["response"], each["sampled_tokens"], each["reward"], rows[name]) for name, each in tasks
        }
    for file in sorted(folder.glob("step_*.json")):
        values = [each for each in json.loads(file.read_text())["test"]["tasks"] if each["rewards"][0] is not None]
        found[int(file.stem.removeprefix("step_"))] = {
            (name := each["row"]["id"]): judge(
                each["responses"][0], each["num_sampled_tokens"][0], each["rewards"][0], rows[name]
            )
            for each in values
        }
    return found


def choose_step(folder: Path) -> int:
    """The last evaluated step, or the one with the best reward on the validation tasks."""
    rewards = {}
    for file in folder.glob("step_*.json"):
        tasks = json.loads(file.read_text()).get("validation", {}).get("tasks", ())
        number = int(file.stem.removeprefix("step_"))
        rewards[number] = fmean(each["rewards"][0] or 0.0 for each in tasks) if tasks else 0.0
    return max(rewards, key=lambda step: (rewards[step], step), default=0)


def list_parts(rows: Mapping[str, Row], names: Sequence[str]) -> dict[str, list[str]]:
    """Parts of the test tasks."""
    by_length = sorted([*TRAINED, *NO_CALL], key=len, reverse=True)
    category = {name: next(each for each in by_length if name.startswith(each)) for name in names}
    seen = {each["name"] for row in rows.values() if not row.is_held_out for each in row.line["function"]}
    parts = {
        "primary": [name for name in names if category[name] in PRIMARY],
        "all": [name for name in names if category[name] in TRAINED],
        "no_call": [name for name in names if category[name] in NO_CALL],
        "test": list(names),
    }
    parts["unseen"] = [
        name for name in parts["primary"] if not seen & {each["name"] for each in rows[name].line["function"]}
    ]
    return parts | {each: [name for name in names if category[name] == each] for each in [*TRAINED, *NO_CALL]}


def measure(
    answers: Mapping[str, Answer], base: Mapping[str, Answer], parts: Mapping[str, list[str]]
) -> dict[str, Any]:
    """Accuracies by part; and of the primary tasks, form and content."""
    primary = [answers[name] for name in parts["primary"]]
    called = [each for each in primary if each.calls]
    named = [each for each in called if each.has_right_names]
    both = [name for name in parts["primary"] if answers[name].calls and base[name].calls]
    return {
        "accuracy": {part: fmean(answers[name].is_right for name in names) for part, names in parts.items() if names},
        "called": fmean(bool(each.calls) for each in primary),
        "right_names_if_called": fmean(each.has_right_names for each in called) if called else None,
        "right_if_right_names": fmean(each.is_right for each in named) if named else None,
        "readable_before_and_after": {
            "tasks": len(both),
            "base": fmean(base[name].is_right for name in both) if both else None,
            "arm": fmean(answers[name].is_right for name in both) if both else None,
        },
        "sampled_tokens": fmean(each.num_tokens for each in primary),
        "read_unlike_paid": sum(each.is_right != each.paid for each in answers.values()),
    }


def compare(before: Mapping[str, float], after: Mapping[str, float], groups: Mapping[str, str]) -> dict[str, Any]:
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
    is_binary = {*before.values(), *after.values()} <= {0.0, 1.0}
    return {
        "tasks": len(before),
        "groups": len(drawn),
        "difference": fmean(after[each] - before[each] for each in before),
        "better": better,
        "worse": worse,
        "p": min(1.0, 2 * tail) if is_binary else None,
        "interval_95": [means[int(0.025 * BOOTSTRAP)], means[int(0.975 * BOOTSTRAP)]],
    }


def average(seeds: Sequence[Mapping[str, Answer]], names: Sequence[str]) -> dict[str, float]:
    return {name: fmean(each[name].is_right for each in seeds) for name in names}


def read_cost(folder: Path) -> dict[str, Any]:
    """Seconds of the arm's processes; of its steps, seconds, rollouts and tokens; and test reward over rollouts."""
    ended = next(file for name in ("done.json", "failed.json") if (file := folder / name).is_file())
    record = json.loads(ended.read_text())
    cost: dict[str, Any] = {"seconds": record["seconds"], "is_cut": record["is_cut"]}
    metrics = folder / "metrics.jsonl"
    rows = load_json_lines(metrics) if metrics.is_file() else []
    steps = {row["step"]: row for row in rows if "perf/step_s" in row}
    if not steps:
        return cost
    evaluated = {row["step"]: row["eval/test/reward"] for row in rows if "eval/test/reward" in row}
    return cost | {
        "steps": len(steps),
        "step_seconds": sum(row["perf/step_s"] for row in steps.values()),
        "rollouts": sum(row["rollout/num_trajectories"] for row in steps.values()),
        "sampled_tokens": sum(row["rollout/num_sampled_tokens"] for row in steps.values()),
        "prompt_tokens": sum(row["rollout/num_prompt_tokens"] for row in steps.values()),
        "useful_groups": fmean(row["experience/num_useful_groups"] for row in steps.values()),
        "curve": [
            {
                "step": step,
                "rollouts": sum(row["rollout/num_trajectories"] for each, row in steps.items() if each <= step),
                "step_seconds": sum(row["perf/step_s"] for each, row in steps.items() if each <= step),
                "reward": reward,
            }
            for step, reward in evaluated.items()
        ],
    }


PAGE = """# Function calls before and after training, reply by reply

The first {number} primary test tasks in the order of the SHA-256 of their ids, and the first {number} questions that no
offered function answers; greedy replies of the untrained model and of the arm `{arm}`. What was trained and what it
reached is in [the recipe](../recipes/function_calling/README.md);
`python -m benchmarks.learning.function_calling ... --examples` writes this page.

How all {num_primary} primary tasks were answered; rows are the untrained model, columns the arm:

{outcomes}
"""
OUTCOMES = ("right", "wrong arguments", "wrong functions", "no readable call")


def find_outcome(answer: Answer) -> str:
    if answer.is_right or not answer.calls:
        return OUTCOMES[0] if answer.is_right else OUTCOMES[3]
    return OUTCOMES[1] if answer.has_right_names else OUTCOMES[2]


def show_outcomes(before: Mapping[str, Answer], after: Mapping[str, Answer], names: Sequence[str]) -> str:
    """Tasks by outcome before and after, as a Markdown table."""
    pairs = Counter((find_outcome(before[name]), find_outcome(after[name])) for name in names)
    rows = (f"| {old} | {' | '.join(str(pairs[old, new]) for new in OUTCOMES)} |" for old in OUTCOMES)
    return "\n".join([f"| before \\ after | {' | '.join(OUTCOMES)} |", f"|{'---|' * 5}", *rows])


def choose_examples(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda each: hashlib.sha256(each.encode()).hexdigest())[:NUM_EXAMPLES]


def show_examples(rows: Mapping[str, Row], names: Iterable[str], arms: Mapping[str, Mapping[str, Answer]]) -> str:
    """Replies of the arms to tasks, as Markdown."""
    lines = []
    for name in names:
        line = rows[name].line
        offered = ", ".join(f"`{each['name']}`" for each in line["function"])
        accepted = textwrap.shorten(json.dumps(line.get("accepted", "no call")), MAX_ACCEPTED)
        question = textwrap.fill(" ".join(line["question"][0][-1]["content"].split()), 116)
        lines += [f"### {name}", "", textwrap.indent(question, "> "), "", f"Offered: {offered}.", ""]
        lines += [f"Accepted: `{accepted}`", ""]
        for arm, answers in arms.items():
            verdict = "right" if answers[name].is_right else "wrong"
            text = "\n".join(textwrap.wrap(answers[name].text.strip(), 116)) or "(nothing)"
            lines += [f"{arm}, {verdict}:", "", "~~~text", text, "~~~", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", help="folder of bfcl-eval's data; the installed package's without it")
    parser.add_argument("--examples", type=Path, help="Markdown file for replies of the base and of an arm")
    parser.add_argument(
        "--trained",
        default="rl-42",
        help="the run that the page of replies shows; arms are compared with its seeds",
    )
    parser.add_argument("--step", type=int, help="step of all runs, in place of the last or the chosen one")
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    folder = find_data(arguments.data)
    functions = group_functions(folder)
    rows = load_rows(folder, "") | split_irrelevance(folder, sys.maxsize)
    first_names = {
        name: find_names(row.line)[0] if "accepted" in row.line else row.line["function"][0]["name"]
        for name, row in rows.items()
    }
    groups = {name: functions.get(each, each) for name, each in first_names.items()}
    folders = [
        each
        for each in sorted(arguments.folder.iterdir())
        if each.is_dir() and not each.name.startswith(("game", "multi_turn"))
    ]
    found = {each.name: load_answers(each, rows) for each in folders}
    evaluated = {name: steps for name, steps in found.items() if steps}
    chosen = {name: choose_step(arguments.folder / name) for name in evaluated}
    if arguments.step is not None:
        chosen = {name: arguments.step if step else 0 for name, step in chosen.items()}
    last = {name: steps[chosen[name]] for name, steps in evaluated.items()}
    base = last[BASE]
    parts = list_parts(rows, list(base))
    details: dict[str, Any] = {"parts": {part: len(names) for part, names in parts.items()}, "seeds": {}, "arms": {}}
    trained = arguments.trained.rpartition("-")[0] or arguments.trained
    by_arm: dict[str, list[str]] = defaultdict(list)
    for name in last:
        by_arm[name.rpartition("-")[0] or name].append(name)
    for name, answers in last.items():
        details["seeds"][name] = measure(answers, base, parts) | {
            "step": chosen[name],
            "steps": {step: measure(each, base, parts) for step, each in evaluated[name].items() if step},
            "against_base": {
                part: compare(average([base], parts[part]), average([answers], parts[part]), groups)
                for part in COMPARED
                if parts[part]
            },
            "cost": read_cost(arguments.folder / name),
        }
    for arm, seeds in by_arm.items():
        own = [last[each] for each in seeds]
        details["arms"][arm] = {
            "seeds": len(seeds),
            "accuracy": {part: fmean(average(own, names).values()) for part, names in parts.items() if names},
            **{
                f"against_{other}": {
                    part: compare(
                        average([last[each] for each in by_arm[other]], parts[part]), average(own, parts[part]), groups
                    )
                    for part in COMPARED
                    if parts[part]
                }
                for other in (BASE, trained)
                if other in by_arm and other != arm
            },
        }
    print(f"| arm | seeds | primary | all | unseen | no call | test | primary against base |\n|{'---|' * 8}")
    for arm, each in details["arms"].items():
        accuracy = each["accuracy"]
        values = " | ".join(
            f"{accuracy.get(part, float('nan')):.1%}" for part in ("primary", "all", "unseen", "no_call", "test")
        )
        against = each.get("against_base", {}).get("primary")
        low, high = against["interval_95"] if against else (0.0, 0.0)
        gain = f"{100 * against['difference']:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})" if against else ""
        print(f"| {arm} | {each['seeds']} | {values} | {gain} |")
    if arguments.examples is not None:
        arms = {BASE: base, arguments.trained: last[arguments.trained]}
        outcomes = show_outcomes(base, last[arguments.trained], parts["primary"])
        page = PAGE.format(
            number=NUM_EXAMPLES, arm=arguments.trained, num_primary=len(parts["primary"]), outcomes=outcomes
        )
        for title, part in (("Calls", "primary"), ("No function fits", "no_call")):
            page += f"\n## {title}\n\n{show_examples(rows, choose_examples(parts[part]), arms)}"
        arguments.examples.write_text(page)
    publish(
        name="function_calling",
        unit="points of accuracy, primary categories",
        ours=100 * details["arms"][trained]["against_base"]["primary"]["difference"],
        peers={},
        device="cpu",
        details=details,
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
