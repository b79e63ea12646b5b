"""One task over the steps of a run, and the difference of two rollouts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import starmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.viewer.answers.conversation import build_conversations, format_conversation
from tunesmith.viewer.answers.steps import describe_row, find_title, load_row, to_number
from tunesmith.viewer.reading.rollout_index import Rows
from tunesmith.viewer.reading.run import Run

MAX_GROUPS = 200
"""Groups of one task that are listed, the newest ones."""
MAX_TASKS = 200


def describe_task(run: Run, task_id: str) -> dict[str, Any]:
    """The groups of a task in ascending order of steps, with each rollout's reward and response."""
    run.index.extend()
    found = run.index.find_task(task_id)
    keys = sorted({(int(row["step"]), int(row["group"])) for row in found})
    groups, row_text = [], None
    for step, group in keys[-MAX_GROUPS:]:
        members = found[(found["step"] == step) & (found["group"] == group)]
        found_rows = list(run.iter_stored(members, ["task_row", "response_text", "failure_message"]))
        row_text = found_rows[0][1]["task_row"]
        groups.append({"step": step, "group": group, "rollouts": list(starmap(describe_row, found_rows))})
    row = {} if row_text is None else load_row(row_text)
    return {"task_id": task_id, "title": find_title(row), "row": dict(row), "groups": groups, "num_groups": len(keys)}


def list_repeated_tasks(run: Run) -> dict[str, Any]:
    """The tasks that were tried in most steps, each with the mean reward of its groups in order of steps."""
    run.index.extend()
    parts = [average_groups(rows) for rows in run.index.iter_rows() if len(rows)]
    if not parts:
        return {"tasks": [], "num_tasks": 0}
    firsts, mean_G = (np.concatenate(column) for column in zip(*parts[::-1], strict=True))
    counts = np.bincount(firsts["task"])
    chosen = np.argsort(-counts, kind="stable")[:MAX_TASKS]
    tasks, task_ids = [], run.index.task_ids
    for code in chosen[counts[chosen] > 0]:
        members = np.flatnonzero(firsts["task"] == code)
        task_id = task_ids[code]
        if task_id not in run.titles:
            ((_, stored),) = run.iter_stored(firsts[members[-1:]], ["task_row"])
            run.titles[task_id] = find_title(load_row(stored["task_row"]))
        tasks.append(
            {
                "task_id": task_id,
                "title": run.titles[task_id],
                "steps": firsts["step"][members].tolist(),
                "means": [to_number(value) for value in mean_G[members]],
            }
        )
    return {"tasks": tasks, "num_tasks": int(np.count_nonzero(counts))}


def average_groups(rows: Rows) -> tuple[Rows, NDArray[Any]]:
    """The first row and the mean reward of each group of a file; a group's rollouts are adjacent."""
    differs = (rows["step"][1:] != rows["step"][:-1]) | (rows["group"][1:] != rows["group"][:-1])
    starts = np.concatenate([[0], np.flatnonzero(differs) + 1])
    is_known = ~np.isnan(rows["reward"])
    sums = np.add.reduceat(np.where(is_known, rows["reward"], 0.0), starts)
    numbers = np.add.reduceat(is_known.astype(np.int64), starts)
    means = np.divide(sums, numbers, out=np.full(len(starts), np.nan), where=numbers > 0)
    return rows[starts], means


def diff_rollouts(runs: Sequence[Run], before: str, after: str) -> dict[str, Any]:
    """The difference of two rollouts, each given as run/step/group/rollout."""
    texts, titles = [], []
    for spec in (before, after):
        number, step, group, index = (int(part) for part in spec.split("/"))
        run = runs[number]
        stored = run.load_rollout(step, group, index)
        text = run.text
        conversations = [] if text is None else build_conversations(stored, text)
        texts.append("\n\n".join(map(format_conversation, conversations)) or stored.trajectory.response_text)
        titles.append(
            {"run": number, "step": step, "group": group, "rollout": index, "reward": stored.trajectory.reward}
        )
    return {"before": titles[0], "after": titles[1], "parts": diff_texts(*texts)}


WORD = re.compile(r"\s+|\w+|[^\w\s]")
MAX_WORDS = 6000
"""Longer texts are compared line by line, because the time is quadratic in the number of parts."""


def diff_texts(before: str, after: str) -> list[dict[str, Any]]:
    """Parts in order: `=` in both, `-` only before, `+` only after."""
    a, b = WORD.findall(before), WORD.findall(after)
    if max(len(a), len(b)) > MAX_WORDS:
        a, b = before.splitlines(keepends=True), after.splitlines(keepends=True)
    parts: list[dict[str, Any]] = []
    for kind, a_start, a_end, b_start, b_end in SequenceMatcher(None, a, b, autojunk=len(a) > MAX_WORDS).get_opcodes():
        if kind == "equal":
            parts.append({"kind": "=", "text": "".join(a[a_start:a_end])})
            continue
        removed, added = "".join(a[a_start:a_end]), "".join(b[b_start:b_end])
        parts += [{"kind": "-", "text": removed}] if removed else []
        parts += [{"kind": "+", "text": added}] if added else []
    return parts
