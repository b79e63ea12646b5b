"""The trie of a group: where its rollouts share tokens and where they part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.experience.samples import chain_turns
from tunesmith.viewer.reading.run import StoredRollout
from tunesmith.viewer.reading.token_text import TokenText

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
                "num_leaves": len(members),
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
    paths = []
    for chain in chain_turns(stored.trajectory.turns):
        ids = np.array(chain[-1].prompt_ids + chain[-1].sampled_ids)
        is_sampled = np.zeros(len(ids), dtype=bool)
        for turn in chain:
            is_sampled[len(turn.prompt_ids) : len(turn.prompt_ids) + len(turn.sampled_ids)] = True
        paths.append(Path(run=stored.trajectory.run_index, ids=ids, is_sampled=is_sampled))
    return paths


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
