"""Evaluation questions with the answers of models next to each other.

A column is one evaluation: a step of a run (key `<run>:<step>`), or a model of a comparison by `tunesmith eval`
(`<run>:=<label>`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from tunesmith.viewer.answers.steps import find_title
from tunesmith.viewer.reading.run import Run

PAGE_ROWS = 50
MAX_ANSWER_CHARS = 2000


def list_evaluations(runs: Sequence[Run]) -> dict[str, Any]:
    """The task sets, and the evaluations on each of them with their mean and interval.

    Those that the page shows first are the first and the last of the first run that has several.
    """
    sets: dict[str, list[dict[str, Any]]] = {}
    for number, run in enumerate(runs):
        for name, key, label, mean, interval, num_tasks in iter_evaluations(run):
            low, high = interval or (None, None)
            column = {"key": f"{number}:{key}", "label": f"{run.name} {label}", "run": number, "num_tasks": num_tasks}
            sets.setdefault(name, []).append(column | {"mean": mean, "low": low, "high": high})
    for columns in sets.values():
        of_runs = [[each for each in columns if each["run"] == number] for number in range(len(runs))]
        several = next((each for each in of_runs if len(each) > 1), columns)
        for column in columns:
            column["is_first_shown"] = column in (several[0], several[-1])
    return {"sets": sets}


def iter_evaluations(run: Run) -> Iterator[tuple[str, str, str, Any, Any, int]]:
    """Set, key, label, mean, interval and number of tasks of each evaluation of a run."""
    for step in run.list_evaluated_steps():
        for name, result in run.load_evaluation(step).items():
            yield name, f"{step}", f"step {step}", result.get("mean"), result.get("interval_95"), len(result["tasks"])
    for name, compared in run.comparison.items():
        for label, result in compared["models"].items():
            reward = result["estimates"].get("reward", {})
            yield name, f"={label}", label, reward.get("mean"), reward.get("interval"), result["num_tasks"]


def list_answers(runs: Sequence[Run], params: Mapping[str, str]) -> dict[str, Any]:
    """One page of the tasks of a set with the answers of the chosen columns.

    Tasks are the same if their rows are, whatever their ids: runs may hold out other rows under the same numbers.
    Filters: `text` in question or answers; `show=differ` keeps tasks on which the columns' rewards differ, `wrong`
    those that the last column did not solve (less than the best reward of all).
    """
    columns = [load_column(runs, params["set"], key) for key in params.get("columns", "").split(",") if key]
    contents: dict[str, set[str]] = {}
    for task_id, content, _ in chain(*columns):
        contents.setdefault(task_id, set()).update([content] if content else [])
    merged: dict[tuple[str, int], tuple[str, list[dict[str, Any] | None]]] = {}
    for index, tasks in enumerate(columns):
        seen: Counter[str] = Counter()
        for task_id, content, cell in tasks:
            if not content:  # comparisons of earlier versions hold ids alone
                content = contents[task_id].copy().pop() if len(contents[task_id]) == 1 else ""
            same = content or task_id
            merged.setdefault((same, seen[same]), (task_id, [None] * len(columns)))[1][index] = cell
            seen[same] += 1
    best = max((reward for _, _, cell in chain(*columns) for reward in cell["rewards"]), default=0.0)
    rows = []
    for (same, _), (task_id, cells) in merged.items():
        row = {} if same == task_id else json.loads(same)
        if keep_row(task_id, row, cells, text=params.get("text", ""), show=params.get("show", ""), best=best):
            rows.append({"task_id": task_id, "title": find_title(row) if row else "", "row": row, "cells": cells})
    page = int(params.get("page") or 0)
    shown = rows[page * PAGE_ROWS : (page + 1) * PAGE_ROWS]
    return {"rows": shown, "num_rows": len(rows), "num_tasks": len(merged), "page_rows": PAGE_ROWS}


def load_column(runs: Sequence[Run], name: str, key: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Id, row as JSON (empty if it is not known), and results of each task of one evaluation."""
    number, _, which = key.partition(":")
    run = runs[int(number)]
    if not which.startswith("="):
        return [describe_task(task, task) for task in run.load_evaluation(int(which)).get(name, {}).get("tasks", ())]
    return [
        describe_task(
            task,
            {
                "rewards": [each["reward"] for each in task["attempts"]],
                "responses": [each["response"] for each in task["attempts"]],
                "failures": [each["failure"] for each in task["attempts"] if each["failure"]],
            },
        )
        for task in run.comparison[name]["models"][which[1:]]["tasks"]
    ]


def describe_task(task: Mapping[str, Any], results: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    known = [reward for reward in results["rewards"] if reward is not None]
    cell = {
        "rewards": known,
        "mean": fmean(known) if known else None,
        "answers": [(answer or "")[:MAX_ANSWER_CHARS] for answer in results.get("responses", ())],
        "failures": results.get("failures", []),
    }
    return task["task_id"], json.dumps(task["row"], sort_keys=True) if task.get("row") else "", cell


def keep_row(
    task_id: str, row: Mapping[str, Any], cells: Sequence[dict[str, Any] | None], *, text: str, show: str, best: float
) -> bool:
    """Whether a task passes the filters."""
    means = [cell["mean"] for cell in cells if cell is not None]
    if show == "differ" and len(set(means)) < 2:
        return False
    if show == "wrong" and (not means or means[-1] == best):
        return False
    wanted = text.casefold()
    texts = [task_id, *map(str, row.values()), *(answer for cell in cells if cell for answer in cell["answers"])]
    return not wanted or any(wanted in each.casefold() for each in texts)
