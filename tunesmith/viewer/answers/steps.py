"""The groups of a step, the rollouts of a group, one rollout, and what the selector chose."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from statistics import fmean, pstdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.experience.step_files import load_step_json
from tunesmith.types import Turn
from tunesmith.viewer.answers.conversation import build_conversations, list_tool_names
from tunesmith.viewer.reading.run import Run, StoredRollout
from tunesmith.viewer.reading.token_text import TokenText

QUESTION_FIELDS = ("question", "problem", "prompt", "query", "instruction", "input", "text", "messages")
MAX_TITLE_CHARS = 240
MAX_ANSWER_CHARS = 300


def to_number(value: float) -> float | None:
    """The number of an index's row; None for NaN."""
    return None if value != value else float(value)


def describe_step(run: Run, step: int) -> dict[str, Any]:
    """The groups of a step with the rewards, advantages and lengths of their rollouts."""
    rows = run.index.find_step(step)
    firsts = rows[np.unique(rows["group"], return_index=True)[1]]
    groups = []
    for first, stored in run.iter_stored(firsts, ["task_id", "task_row"]):
        members = rows[rows["group"] == first["group"]]
        rewards = [to_number(value) for value in members["reward"]]
        known = [reward for reward in rewards if reward is not None]
        groups.append(
            {
                "group": int(first["group"]),
                "task_id": stored["task_id"],
                "title": find_title(load_row(stored["task_row"])),
                "runs": members["run"].tolist(),
                "rewards": rewards,
                "advantages": [to_number(value) for value in members["advantage"]],
                "num_tokens": members["num_tokens"].tolist(),
                "num_failures": len(rewards) - len(known),
                "mean": fmean(known) if known else None,
                "std": pstdev(known) if known else None,
            }
        )
    return {"step": step, "groups": groups}


def load_row(text: str) -> Mapping[str, Any]:
    loaded = json.loads(text)
    return loaded if isinstance(loaded, dict) else {"task": loaded}


def find_title(row: Mapping[str, Any]) -> str:
    """The question of a task in one line: a field with a usual name, or the longest text."""
    texts = {name: value for name, value in row.items() if isinstance(value, str)}
    named = next((texts[name] for name in QUESTION_FIELDS if name in texts), None)
    title = named if named is not None else max(texts.values(), key=len, default=json.dumps(row, default=str))
    return " ".join(title.split())[:MAX_TITLE_CHARS]


def describe_row(row: Any, stored: Mapping[str, Any]) -> dict[str, Any]:
    """What a list of rollouts shows of one, from the index and the columns `response_text` and `failure_message`."""
    return {
        "run": int(row["run"]),
        "reward": to_number(row["reward"]),
        "advantage": to_number(row["advantage"]),
        "num_tokens": int(row["num_tokens"]),
        "response": (stored["response_text"] or "")[:MAX_ANSWER_CHARS],
        "failure": stored["failure_message"] and stored["failure_message"][:MAX_ANSWER_CHARS],
    }


def describe_group(run: Run, step: int, group: int) -> dict[str, Any]:
    """The rollouts of a group in one line each, and the task's row."""
    rollouts, rows = run.load_group(step, group), run.index.find_step(step)
    first = rollouts[0]
    return {
        "num_groups": int(rows["group"].max()) + 1,
        "step": step,
        "group": group,
        "task_id": first.trajectory.task.task_id,
        "row": dict(first.trajectory.task.row),
        "baseline_reward": first.baseline_reward,
        "rollouts": [summarize_rollout(run, stored) for stored in rollouts],
    }


def summarize_rollout(run: Run, stored: StoredRollout) -> dict[str, Any]:
    """One line about a rollout."""
    trajectory = stored.trajectory
    sampled = [turn.sampled_ids for turn in trajectory.turns]
    text, failure = run.text, trajectory.failure
    tools = [] if text is None else list_tool_names(text.decode_batch(sampled), text.reply_format)
    return {
        "run": trajectory.run_index,
        "reward": trajectory.reward,
        "advantage": stored.advantage,
        "turn_advantages": stored.turn_advantages,
        "num_tokens": sum(map(len, sampled)),
        "num_turns": len(trajectory.turns),
        "stop_reasons": [turn.stop_reason for turn in trajectory.turns],
        "tools": tools,
        "metrics": dict(trajectory.metrics),
        "failure": None if failure is None else f"{failure.where}: {failure.message}"[:MAX_ANSWER_CHARS],
        "response": trajectory.response_text[:MAX_ANSWER_CHARS],
        "duration_s": trajectory.duration_s,
    }


def describe_rollout(run: Run, step: int, group: int, number: int) -> dict[str, Any]:
    """A rollout with its conversations, its tokens and its failure."""
    stored = run.load_rollout(step, group, number)
    trajectory, failure, text = stored.trajectory, stored.trajectory.failure, run.text
    rows = run.index.find_step(step)
    return summarize_rollout(run, stored) | {
        "step": step,
        "group": group,
        "siblings": rows["run"][rows["group"] == group].tolist(),
        "num_groups": int(rows["group"].max()) + 1 if len(rows) else 0,
        "task_id": trajectory.task.task_id,
        "row": dict(trajectory.task.row),
        "response": trajectory.response_text,
        "failure": None if failure is None else asdict(failure),
        "has_text": text is not None,
        "conversations": [] if text is None else build_conversations(stored, text),
        "tokens": build_tokens(stored, text),
    }


def describe_selection(run: Run, step: int) -> dict[str, Any]:
    """The tasks that the selector chose for a step and why, with what they turned out to be."""
    selection: Mapping[str, Any] = load_step_json(run.paths.selection(step))
    waiting: dict[str, list[dict[str, Any]]] = {}
    for group in describe_step(run, step)["groups"]:
        waiting.setdefault(group["task_id"], []).append(group)
    choices = []
    for choice in selection["choices"]:
        groups = waiting.get(choice["task_id"])
        outcome = groups.pop(0) if groups else {}
        choices.append(dict(choice) | {name: outcome.get(name) for name in ("group", "mean", "title")})
    return {
        "step": step,
        "choices": choices,
        "summary": selection.get("summary", {}),
        "histogram": selection.get("histogram", []),
    }


CONTEXT, TRAINED, UNTRAINED = 0, 1, 2
"""Masks: not sampled here; sampled and trained; sampled and excluded from training."""


def build_tokens(stored: StoredRollout, text: TokenText | None) -> list[dict[str, Any]]:
    """One entry for each conversation: lists with one value per token, null where a token was not sampled."""
    return [list_tokens(chain, text) for chain in stored.iter_chains()]


def list_tokens(chain: Sequence[tuple[int, Turn, float | None]], text: TokenText | None) -> dict[str, Any]:
    ids = chain[-1][1].prompt_ids + chain[-1][1].sampled_ids
    masks: list[int] = [CONTEXT] * len(ids)
    logprobs: list[float | None] = [None] * len(ids)
    advantages: list[float | None] = [None] * len(ids)
    versions: list[int | None] = [None] * len(ids)
    for _, turn, advantage in chain:
        start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.sampled_ids)
        masks[start:end] = [UNTRAINED if advantage is None else TRAINED] * (end - start)
        logprobs[start:end] = [round(value, 5) for value in turn.logprobs]
        advantages[start:end] = [advantage] * (end - start)
        versions[start:end] = turn.policy_versions
    return {
        "text": [f"<{token_id}>" for token_id in ids] if text is None else text.split(ids),
        "id": list(ids),
        "mask": masks,
        "logprob": logprobs,
        "advantage": advantages,
        "version": versions,
    }


MAX_PART_CHARS = 1200
"""Longer text of a node is cut in its middle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The tokens of one conversation of a rollout."""

    run: int
    ids: NDArray[np.int64]
    is_sampled: NDArray[np.bool_]


def build_trie(rollouts: Sequence[StoredRollout], text: TokenText | None) -> dict[str, Any]:
    """Nodes in depth-first order: shared tokens as text, the rollouts below, and their mean reward."""
    paths = [path for stored in rollouts for path in list_paths(stored)]
    rewards = {stored.trajectory.run_index: stored.trajectory.reward for stored in rollouts}
    nodes: list[dict[str, Any]] = []
    stack = [(paths, 0, 0)] if paths else []
    while stack:
        members, start, depth = stack.pop()
        end = find_fork(members, start)
        runs = sorted({path.run for path in members})
        known = [reward for run in runs if (reward := rewards[run]) is not None]
        nodes.append(
            {
                "depth": depth,
                "start": start,
                "num_tokens": end - start,
                "parts": list_parts(members[0], start, end, text),
                "runs": runs,
                "ends": sorted({path.run for path in members if len(path.ids) == end}),
                "reward": fmean(known) if known else None,
            }
        )
        children: dict[int, list[Path]] = {}
        for path in members:
            if len(path.ids) > end:
                children.setdefault(int(path.ids[end]), []).append(path)
        stack += [(child, end, depth + 1) for child in sorted(children.values(), key=len)]
    return {
        "nodes": nodes,
        "num_tokens": sum(node["num_tokens"] for node in nodes),
        "num_flat_tokens": sum(len(path.ids) for path in paths),
    }


def list_paths(stored: StoredRollout) -> list[Path]:
    return [
        Path(run=stored.trajectory.run_index, ids=np.array(each["id"]), is_sampled=np.array(each["mask"]) != CONTEXT)
        for each in build_tokens(stored, None)
    ]


def find_fork(members: Sequence[Path], start: int) -> int:
    """The position at which the paths part or the first of them ends."""
    first = members[0].ids
    end = min(len(path.ids) for path in members)
    for path in members[1:]:
        differs = np.flatnonzero(first[start:end] != path.ids[start:end])
        if len(differs):
            end = start + int(differs[0])
    return end


def list_parts(path: Path, start: int, end: int, text: TokenText | None) -> list[dict[str, Any]]:
    """The text of a node in runs of tokens that were sampled, or were not."""
    parts = []
    for is_sampled, positions in groupby(range(start, end), key=lambda position: bool(path.is_sampled[position])):
        ids = [int(path.ids[position]) for position in positions]
        shown = f"{len(ids)} tokens" if text is None else text.decode_batch([ids])[0]
        if len(shown) > MAX_PART_CHARS:
            shown = f"{shown[: MAX_PART_CHARS // 2]} [...] {shown[-MAX_PART_CHARS // 2 :]}"
        parts.append({"text": shown, "sampled": is_sampled, "num_tokens": len(ids)})
    return parts
