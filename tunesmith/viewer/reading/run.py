"""A run in the viewer: its record, an index of its rollouts, its tokenizer, and the groups read last."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.errors import StorageError
from tunesmith.experience.samples import chain_turns
from tunesmith.experience.store import parse_row
from tunesmith.runs.record import RunRecord, find_run_folders
from tunesmith.types import Trajectory, Turn
from tunesmith.viewer.reading.rollout_index import RolloutIndex, Rows
from tunesmith.viewer.reading.token_text import TokenText, find_reply_format, find_tokenizer

NUM_KEPT_GROUPS = 3
ROLLOUT = ["group_index", "run_index", "task_id", "task_index", "task_row", "reward", "advantage", "turn_advantages"]
ROLLOUT += ["baseline_reward", "failure_where", "failure_message", "failure_line", "failure_traceback"]
ROLLOUT += ["response_text", "duration_s", "metrics", "turns", "untrained_turns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRollout:
    """One trajectory and what its row holds besides."""

    trajectory: Trajectory
    advantage: float | None
    turn_advantages: Sequence[float] | None
    baseline_reward: float | None

    def iter_chains(self) -> Iterator[list[tuple[int, Turn, float | None]]]:
        """Conversations as turns that extend each other, with their numbers and, if they are trained, advantages."""
        turns = self.trajectory.turns
        values: Sequence[float | None] = self.turn_advantages or [self.advantage] * len(turns)
        is_used = self.advantage is not None
        for chain in chain_turns(turns):
            yield [(i, turns[i], values[i] if turns[i].is_trained and is_used else None) for i in chain]


class Run(RunRecord):
    """The folder of a training run, of a fine-tuning, or of a comparison of models."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.name = root.name
        self.index = RolloutIndex(self.rollouts)
        self.last_candidates: tuple[Any, Rows] | None = None
        """Filters of the last search and the rows of the index that they select."""
        self.titles: dict[str, str] = {}
        """The question of each task that has been listed."""
        self.last_diagnosis: tuple[str, dict[str, Any]] | None = None
        """The version of the run that the doctor looked at last, and what he said."""
        self._text: TokenText | None = None
        self._load_group = functools.lru_cache(maxsize=NUM_KEPT_GROUPS)(self._read_group)

    @property
    def text(self) -> TokenText | None:
        """The run's tokenizer; None while there is none, for example before the first checkpoint."""
        if self._text is None and (path := find_tokenizer(self)) is not None:
            self._text = TokenText(path, find_reply_format(path.parent, self.settings))
        return self._text

    def iter_stored(self, rows: Rows, columns: Sequence[str]) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Rows of the index, all of one step, in the order of the file, each with the columns that are stored of it."""
        if not len(rows):
            return
        row_at = {int(row["position"]): row for row in rows}
        first, last = min(row_at), max(row_at)
        stored = self.rollouts.iter_rows(int(rows["step"][0]), columns, first=first, num_rows=last - first + 1)
        for position, values in enumerate(stored, start=first):
            if position in row_at:
                yield row_at[position], values

    def load_rollout(self, step: int, group: int, run: int) -> StoredRollout:
        """One trajectory with its tokens."""
        found = [each for each in self.load_group(step, group) if each.trajectory.run_index == run]
        if not found:
            raise StorageError(f"step {step} has no rollout {run} of group {group}")
        return found[0]

    def load_group(self, step: int, group: int) -> list[StoredRollout]:
        """The trajectories of a group with their tokens; those of the last groups are kept."""
        return self._load_group(step, group, self.rollouts.stamp(step))

    def _read_group(self, step: int, group: int, stamp: tuple[int, int]) -> list[StoredRollout]:
        rows: Rows = self.index.find_step(step)
        members = rows[rows["group"] == group]
        if not len(members):
            raise StorageError(f"step {step} has no group {group}")
        names = ("advantage", "turn_advantages", "baseline_reward")
        return [
            StoredRollout(trajectory=parse_row(row), **{name: row[name] for name in names})
            for _, row in self.iter_stored(members, ROLLOUT)
        ]


def open_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs at the paths, each a run folder, one of its checkpoints, a folder of `tunesmith eval`, or a folder that
    holds such folders. StorageError if a path has none."""
    runs: list[Run] = []
    find_new_runs(runs, paths, may_be_none=False)
    return runs


def find_new_runs(runs: list[Run], paths: Sequence[str | Path], *, may_be_none: bool = True) -> None:
    """Append the runs that have appeared at the paths, so that the numbers of the others stay; name all of them by the
    shortest ends of their paths that tell them apart."""
    known = {run.root for run in runs}
    for path in paths:
        try:
            roots = find_run_folders(Path(path).expanduser().absolute())
        except StorageError:
            if may_be_none:
                continue  # a run that fails before its first step removes its folder
            raise
        runs += [Run(root) for root in roots if root not in known]
        known |= {*roots}
    length = 1
    while len({run.root.parts[-length:] for run in runs}) < len(runs):
        length += 1
    for run in runs:
        run.name = "/".join(run.root.parts[-length:])
