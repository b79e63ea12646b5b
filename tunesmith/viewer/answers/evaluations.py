"""Evaluation questions with the answers of models next to each other.

A column is one evaluation: a step of a run (key `<run>:<step>`), or a model of a comparison by `tunesmith eval`
(`<run>:=<label>`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from tunesmith.viewer.answers.steps import find_title
from tunesmith.viewer.reading.run import Run

PAGE_ROWS = 50
MAX_ANSWER_CHARS = 2000


def list_evaluations(runs: Sequence[Run]) -> dict[str, Any]:
    """The task sets, and the evaluations on each of them with their mean and interval."""
    sets: dict[str, list[dict[str, Any]]] = {}
    for number, run in enumerate(runs):
        columns: list[tuple[str, str, str, int | None, Any, Any, int]] = [
            (name, f"{step}", f"step {step}", step, result.get("mean"), result.get("interval_95"), len(result["tasks"]))
            for step in run.list_evaluated_steps()
            for name, result in run.load_evaluation(step).items()
        ]
        columns += [
            (name, f"={label}", label, None, reward.get("mean"), reward.get("interval"), result["num_tasks"])
            for name, compared in run.comparison.items()
            for label, result in compared["models"].items()
            for reward in (result["estimates"].get("reward", {}),)
        ]
        for name, key, label, step, mean, interval, num_tasks in columns:
            low, high = interval or (None, None)
            column = {"key": f"{number}:{key}", "label": f"{run.name} {label}", "run": number, "step": step}
            column |= {"mean": mean, "low": low, "high": high, "num_tasks": num_tasks}
            sets.setdefault(name, []).append(column)
    return {"sets": sets}


def list_answers(runs: Sequence[Run], params: Mapping[str, str]) -> dict[str, Any]:
    """One page of the tasks of a set with the answers of the chosen columns.

    Filters: `text` in question or answers; `show=differ` keeps tasks on which the columns' rewards differ, `wrong`
    those that the last column did not solve (less than the best reward of all).
    """
    name, keys = params["set"], [key for key in params.get("columns", "").split(",") if key]
    columns = [load_column(runs, name, key) for key in keys]
    order: dict[str, Mapping[str, Any]] = {}
    for tasks in columns:
        for task_id, task in tasks.items():
            order.setdefault(task_id, task.get("row") or order.get(task_id, {}))
    best = max((reward for tasks in columns for task in tasks.values() for reward in task["rewards"]), default=0.0)
    rows = []
    for task_id, row in order.items():
        cells = [tasks.get(task_id) for tasks in columns]
        if keep_row(task_id, row, cells, text=params.get("text", ""), show=params.get("show", ""), best=best):
            rows.append({"task_id": task_id, "title": find_title(row) if row else "", "row": dict(row), "cells": cells})
    page = int(params.get("page") or 0)
    shown = rows[page * PAGE_ROWS : (page + 1) * PAGE_ROWS]
    return {"rows": shown, "num_rows": len(rows), "num_tasks": len(order), "page_rows": PAGE_ROWS}


def load_column(runs: Sequence[Run], name: str, key: str) -> dict[str, dict[str, Any]]:
    """Task -> rewards, answers and failures of one evaluation."""
    number, _, which = key.partition(":")
    run = runs[int(number)]
    if which.startswith("="):
        tasks = run.comparison[name]["models"][which[1:]]["tasks"]
        return {each["task_id"]: read_attempts(each) for each in tasks}
    result = run.load_evaluation(int(which)).get(name)
    return {} if result is None else {each["task_id"]: read_task(each) for each in result["tasks"]}


def read_task(task: Mapping[str, Any]) -> dict[str, Any]:
    known = [reward for reward in task["rewards"] if reward is not None]
    return {
        "rewards": known,
        "mean": fmean(known) if known else None,
        "answers": [(answer or "")[:MAX_ANSWER_CHARS] for answer in task.get("responses", [])],
        "failures": task.get("failures", []),
        "row": task.get("row"),
        "num_tokens": task.get("num_sampled_tokens", []),
    }


def read_attempts(task: Mapping[str, Any]) -> dict[str, Any]:
    """A task of a comparison in the form of `read_task`."""
    attempts = task["attempts"]
    return read_task(
        {
            "rewards": [each["reward"] for each in attempts],
            "responses": [each["response"] for each in attempts],
            "failures": [each["failure"] for each in attempts if each["failure"]],
            "row": task.get("row"),
            "num_sampled_tokens": [each["sampled_tokens"] for each in attempts],
        }
    )


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
