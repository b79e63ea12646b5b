"""Trajectories of a run that match filters, newest step first.

Filters on numbers use the index. Text and tools need the rows themselves, so a search works for at most `LIMIT_S` and
returns a cursor to continue from: a search of a million trajectories neither blocks the page nor fills the memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.viewer.answers.conversation import list_tool_names
from tunesmith.viewer.answers.steps import describe_row, find_title, load_row
from tunesmith.viewer.reading.rollout_index import NO_FAILURE, ROW, Rows
from tunesmith.viewer.reading.run import Run

LIMIT_S = 0.4
MAX_MATCHES = 100
TEXT = ["task_row", "response_text", "failure_message"]
SORTS: Mapping[str, tuple[str, int] | None] = {
    "newest": None,
    "highest reward": ("reward", -1),
    "lowest reward": ("reward", 1),
    "longest": ("num_tokens", -1),
    "shortest": ("num_tokens", 1),
    "largest advantage": ("advantage", -1),
    "smallest advantage": ("advantage", 1),
}
"""Order of the matches -> field of the index and its sign."""
MAX_SORTED = 20_000
"""Matches of the filters on numbers that are looked at when they are sorted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """What a trajectory must have; None or empty does not filter."""

    min_reward: float | None = None
    max_reward: float | None = None
    min_tokens: float | None = None
    max_tokens: float | None = None
    min_turns: float | None = None
    max_turns: float | None = None
    first_step: float | None = None
    last_step: float | None = None
    status: str = ""
    """`failed`, `scored`, `trained` or `untrained`."""
    task: str = ""
    """Part of the task's id."""
    cause: float | None = None
    """Number of a cause of failures."""
    tool: str = ""
    """Name of a tool that was called; `*` any, `-` none."""
    text: str = ""
    """Part of the task, the response, a reply or the failure's message; the case does not matter."""
    sort: str = "newest"
    """One of `SORTS`."""


def parse_filters(params: Mapping[str, str]) -> Filters:
    """Filters of a query; ValueError for a number that is none."""
    values: dict[str, Any] = {}
    for field in fields(Filters):
        text = params.get(field.name, "").strip()
        if text:
            try:
                values[field.name] = text if isinstance(field.default, str) else float(text)
            except ValueError:
                raise ValueError(f"{field.name} must be a number, got {text!r}") from None
    filters = Filters(**values)
    if filters.sort not in SORTS:
        raise ValueError(f"sort must be one of {', '.join(SORTS)}, got {filters.sort!r}")
    return filters


def search_rollouts(run: Run, params: Mapping[str, str]) -> dict[str, Any]:
    """Matches from `cursor` on, the next cursor (None at the end), and how much has been searched."""
    filters, cursor = parse_filters(params), int(params.get("cursor") or 0)
    deadline = time.monotonic() + LIMIT_S
    is_indexed = run.index.extend(limit_s=LIMIT_S)
    progress = {
        "num_rollouts": run.index.num_rows,
        "indexed_share": run.index.num_read_files / max(run.index.num_files, 1),
    }
    if not is_indexed:
        return {"matches": [], "cursor": cursor, "num_candidates": None, **progress}
    candidates = find_candidates(run, filters)
    matches: list[dict[str, Any]] = []
    position = cursor
    for first, last in iter_blocks(candidates, cursor):
        matches += match_block(run, candidates[first:last], filters)
        position = last
        if len(matches) >= MAX_MATCHES or time.monotonic() > deadline:
            break
    is_done = position >= len(candidates)
    return {
        "matches": matches,
        "cursor": None if is_done else position,
        "num_candidates": len(candidates),
        "searched_share": 1.0 if is_done else position / len(candidates),
        **progress,
    }


def find_candidates(run: Run, filters: Filters) -> Rows:
    """The rows that pass the filters on numbers, in the order of the result; those of the last search are kept."""
    key = (replace(filters, text="", tool=""), run.index.stamp)
    if run.last_candidates is None or run.last_candidates[0] != key:
        parts = [rows[select(run, rows, filters)][::-1] for rows in run.index.iter_rows()]
        found: Rows = np.concatenate([np.empty(0, ROW), *parts])
        if (order := SORTS[filters.sort]) is not None:
            name, sign = order
            found = found[np.argsort(sign * found[name].astype(np.float64), kind="stable")][:MAX_SORTED]
        run.last_candidates = (key, found)
    return run.last_candidates[1]


def select(run: Run, rows: Rows, filters: Filters) -> NDArray[np.bool_]:
    """Which rows pass the filters on numbers; a missing reward passes no limit on rewards."""
    chosen = np.ones(len(rows), dtype=bool)
    for name, low, high in (
        ("reward", filters.min_reward, filters.max_reward),
        ("num_tokens", filters.min_tokens, filters.max_tokens),
        ("num_turns", filters.min_turns, filters.max_turns),
        ("step", filters.first_step, filters.last_step),
    ):
        if low is not None:
            chosen &= rows[name] >= np.float32(low)
        if high is not None:
            chosen &= rows[name] <= np.float32(high)
    if filters.status in ("failed", "scored"):
        chosen &= (rows["failure"] != NO_FAILURE) == (filters.status == "failed")
    if filters.status in ("trained", "untrained"):
        chosen &= np.isnan(rows["advantage"]) == (filters.status == "untrained")
    if filters.cause is not None:
        chosen &= rows["failure"] == int(filters.cause)
    if filters.task:
        named = [filters.task in task_id for task_id in run.index.task_ids]
        chosen &= np.array(named, dtype=bool)[rows["task"]] if named else False
    return chosen


def iter_blocks(candidates: Rows, start: int) -> Iterator[tuple[int, int]]:
    """Borders of runs of candidates that are of one step, at most `MAX_MATCHES` long."""
    while start < len(candidates):
        part = candidates["step"][start : start + MAX_MATCHES]
        others = np.flatnonzero(part != part[0])
        end = start + (int(others[0]) if len(others) else len(part))
        yield start, end
        start = end


def match_block(run: Run, block: Rows, filters: Filters) -> list[dict[str, Any]]:
    """The candidates of one step that match the filters on text and tools, in their order."""
    text = run.text
    needs_replies = text is not None and bool(filters.text or filters.tool)
    columns = [*TEXT, "task_id", *(["turns.sampled_ids"] if needs_replies else [])]
    matched: dict[int, dict[str, Any]] = {}
    for row, stored in run.iter_stored(block, columns):
        replies, tools = [], []
        if needs_replies and text is not None:
            replies = text.decode_batch([turn["sampled_ids"] for turn in stored["turns"] or ()])
            tools = list_tool_names(replies, text.reply_format)
        if has_text(stored, replies, filters.text) and has_tool(tools, filters.tool):
            matched[int(row["position"])] = describe_row(row, stored) | {
                "step": int(row["step"]),
                "group": int(row["group"]),
                "num_turns": int(row["num_turns"]),
                "task_id": stored["task_id"],
                "title": find_title(load_row(stored["task_row"])),
                "snippet": find_snippet(stored, replies, filters.text),
                "tools": tools,
            }
    return [matched[position] for position in block["position"].tolist() if position in matched]


def has_text(row: Mapping[str, Any], replies: list[str], text: str) -> bool:
    wanted = text.casefold()
    return not wanted or any(wanted in (part or "").casefold() for part in (*(row[name] for name in TEXT), *replies))


def has_tool(tools: list[str], tool: str) -> bool:
    return not tool or (not tools if tool == "-" else bool(tools) if tool == "*" else tool in tools)


def find_snippet(row: Mapping[str, Any], replies: list[str], text: str) -> str | None:
    """The surroundings of the text where it is neither in the task nor in the response."""
    wanted = text.casefold()
    if not wanted or wanted in (row["response_text"] or "").casefold():
        return None
    for part in (*replies, row["failure_message"] or ""):
        found = part.casefold().find(wanted)
        if found >= 0:
            return part[max(found - 80, 0) : found + len(text) + 80]
    return None
