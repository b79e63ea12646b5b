"""An opened run folder: its state, metrics, rollouts and evaluations, all read when they are asked for."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from tunesmith.errors import StorageError
from tunesmith.experience.step_files import load_step_json
from tunesmith.experience.store import parse_row
from tunesmith.storage import CHECKPOINT, RunPaths, is_locked, load_json, storage_errors
from tunesmith.types import Trajectory
from tunesmith.viewer.reading.metrics_log import MetricsLog
from tunesmith.viewer.reading.reply_format import find_reply_format
from tunesmith.viewer.reading.rollout_files import RolloutFiles
from tunesmith.viewer.reading.rollout_index import RolloutIndex, Rows
from tunesmith.viewer.reading.token_text import TokenText, find_tokenizer

State = Literal["running", "stopped", "interrupted", "finished", "comparison"]
COMPARISON = "comparison.json"
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


class Run:
    """A folder of a training run, of a fine-tuning, or of a comparison of models."""

    def __init__(self, root: Path, *, name: str) -> None:
        self.root, self.name, self.paths = root, name, RunPaths(root)
        self.metrics = MetricsLog(self.paths.metrics)
        self.files = RolloutFiles(self.paths.rollouts(0).parent)
        self.index = RolloutIndex(self.files)
        self.last_candidates: tuple[Any, Rows] | None = None
        """Filters of the last search and the rows of the index that they select."""
        self._text: TokenText | None = None
        self._groups: dict[tuple[int, int, tuple[int, int]], list[StoredRollout]] = {}
        self._evaluation = functools.lru_cache(maxsize=16)(self._load_evaluation)

    @functools.cached_property
    def config(self) -> Mapping[str, Any]:
        """The values of config.yaml; empty if there is none."""
        if not self.paths.config.is_file():
            return {}
        with storage_errors(self.paths.config, "read"):
            text = self.paths.config.read_text(encoding="utf-8")
        try:
            values = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except yaml.YAMLError as error:
            raise StorageError(f"cannot read {self.paths.config}: it is not YAML ({error})") from error
        return values if isinstance(values, dict) else {}

    @property
    def text(self) -> TokenText | None:
        """The run's tokenizer; None while there is none, for example before the first checkpoint."""
        if self._text is None and (path := find_tokenizer(self.root, self.config)) is not None:
            self._text = TokenText(path, find_reply_format(path.parent, self.config))
        return self._text

    @property
    def is_comparison(self) -> bool:
        return not self.paths.metrics.is_file()

    def find_state(self) -> State:
        """Whether the run is still running, and how it ended."""
        if self.is_comparison:
            return "comparison"
        if is_locked(self.paths.lock):
            return "running"
        if self.paths.error.is_file():
            return "stopped"
        if self.paths.stopped.is_file():
            return "finished"
        total = self.config.get("total_steps")
        if isinstance(total, int):
            return "finished" if self.metrics.last_step >= total else "interrupted"
        has_end = (self.root / "model" / "DONE.json").is_file() or self.paths.checkpoint(
            self.metrics.last_step
        ).is_dir()
        return "finished" if has_end else "interrupted"

    def list_evaluated_steps(self) -> list[int]:
        """Steps that have an evaluation file."""
        names = [
            re.fullmatch(r"step_(\d+)\.json", path.name) for path in self.paths.evaluation(0).parent.glob("*.json")
        ]
        return sorted(int(match[1]) for match in names if match)

    def list_selected_steps(self) -> bool:
        """Whether a selector explained its choices."""
        return self.paths.selection(0).parent.is_dir()

    def load_evaluation(self, step: int) -> Mapping[str, Any]:
        """The content of eval/step_N.json."""
        path = self.paths.evaluation(step)
        with storage_errors(path, "read"):
            modified = path.stat().st_mtime_ns
        loaded: Mapping[str, Any] = self._evaluation(step, modified)
        return loaded

    def _load_evaluation(self, step: int, modified: int) -> Mapping[str, Any]:
        loaded: Mapping[str, Any] = load_json(self.paths.evaluation(step))
        return loaded

    @functools.cached_property
    def comparison(self) -> Mapping[str, Any]:
        """The content of comparison.json; empty if there is none."""
        path = self.root / COMPARISON
        loaded: Mapping[str, Any] = load_json(path) if path.is_file() else {}
        return loaded

    def load_selection(self, step: int) -> Mapping[str, Any]:
        """The choices of a selector for a step."""
        loaded: Mapping[str, Any] = load_step_json(self.paths.selection(step))
        return loaded

    def load_rollout(self, step: int, group: int, run: int) -> StoredRollout:
        """One trajectory with its tokens."""
        found = [each for each in self.load_group(step, group) if each.trajectory.run_index == run]
        if not found:
            raise StorageError(f"step {step} has no rollout {run} of group {group}")
        return found[0]

    def load_group(self, step: int, group: int) -> list[StoredRollout]:
        """The trajectories of a group with their tokens; those of the last groups are kept."""
        key = (step, group, self.files.stamp(step))
        if key not in self._groups:
            self._groups = dict([*self._groups.items()][1 - NUM_KEPT_GROUPS :])
            self._groups[key] = self._load_group(step, group)
        return self._groups[key]

    def _load_group(self, step: int, group: int) -> list[StoredRollout]:
        rows: Rows = self.index.find_step(step)
        positions = rows["position"][rows["group"] == group]
        if not len(positions):
            raise StorageError(f"step {step} has no group {group}")
        first, last = int(positions.min()), int(positions.max())
        found = self.files.iter_rows(step, ROLLOUT, first=first, num_rows=last - first + 1)
        return [parse_rollout(row) for row in found if row["group_index"] == group]


def parse_rollout(row: dict[str, Any]) -> StoredRollout:
    return StoredRollout(
        trajectory=parse_row(row),
        advantage=row["advantage"],
        turn_advantages=row["turn_advantages"],
        baseline_reward=row["baseline_reward"],
    )


def open_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs at the paths, each a run folder, one of its checkpoints, a folder of `tunesmith eval`, or a folder that
    holds such folders. StorageError if a path has none."""
    roots: dict[Path, None] = {}
    for path in paths:
        roots |= dict.fromkeys(find_roots(Path(path).expanduser().absolute()))
    return [Run(root, name=name) for root, name in zip(roots, name_runs(list(roots)), strict=True)]


def find_roots(path: Path) -> list[Path]:
    """The run folders at or below a path."""
    if not path.is_dir():
        raise StorageError(f"{path} is not the folder of a run: there is no such folder")
    if (CHECKPOINT.fullmatch(path.name) or path.name == "model") and is_run(path.parent):
        return [path.parent]
    if is_run(path):
        return [path]
    names = ("metrics.jsonl", COMPARISON)
    below = sorted(
        {each.parent for depth in ("*", "*/*", "*/*/*") for name in names for each in path.glob(f"{depth}/{name}")}
    )
    found = [each for each in below if not any(part.startswith("old-") for part in each.parts)]
    if not found:
        raise StorageError(
            f"{path} is not the folder of a run: it has no metrics.jsonl or {COMPARISON}, nor any below it"
        )
    return found


def is_run(path: Path) -> bool:
    return (path / "metrics.jsonl").is_file() or (path / COMPARISON).is_file()


def name_runs(roots: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart."""
    for length in range(1, max(len(root.parts) for root in roots) + 1):
        names = ["/".join(root.parts[-length:]) for root in roots]
        if len(set(names)) == len(names):
            return names
    return [str(root) for root in roots]
