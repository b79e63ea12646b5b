"""Experiment trackers: their interface, the description of a run that they receive, and the table of them by name.

Each receives every metric under the same name, and the run's settings. TensorBoard writes into the run folder; the
others are configured by their own environment variables (WANDB_MODE, MLFLOW_TRACKING_URI, SWANLAB_MODE). A resumed run
keeps its tracker id, which is saved in the run folder; a new run gets a new one.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tunesmith.errors import ConfigError
from tunesmith.storage import RunPaths, save_text, storage_errors


class Tracker(Protocol):
    """Logs metrics by step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, *, is_failed: bool) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The properties of a run that trackers need."""

    root: Path
    """The run folder, `<project>/<name>`."""
    committed_step: int | None = None
    """The step that a resumed run continues from; None for a new run."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Hyperparameters: dotted key -> value."""

    @property
    def project(self) -> str:
        return self.root.absolute().parent.name

    @property
    def name(self) -> str:
        return self.root.absolute().name

    def load_id(self, tracker: str) -> str | None:
        """The saved id in this tracker; None for a new run, and for one that has not used it."""
        path = RunPaths(self.root).tracker_id(tracker)
        if self.committed_step is None or not path.exists():
            return None
        with storage_errors(path, "read"):
            return path.read_text(encoding="utf-8").strip() or None

    def save_id(self, tracker: str, run_id: str) -> None:
        save_text(RunPaths(self.root).tracker_id(tracker), f"{run_id}\n")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted keys; an empty mapping stays a value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


TRACKERS: Mapping[str, str] = {
    "tensorboard": "tunesmith.monitor.tensorboard:TensorBoardTracker",
    "wandb": "tunesmith.monitor.hosted_tracker:HostedTracker",
    "mlflow": "tunesmith.monitor.mlflow_tracker:MlflowTracker",
    "swanlab": "tunesmith.monitor.hosted_tracker:HostedTracker",
}
"""The classes by their names in `monitor.trackers`, imported when they are used."""
EXTRAS = ("wandb", "mlflow", "swanlab")
"""Trackers with an optional dependency: the module, and the extra that installs it, have the tracker's name."""


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError if the package of a tracker is not installed."""
    for name in names:
        if name in EXTRAS and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"monitor.trackers: {name} is not installed; pip install 'tunesmith[{name}]', or remove it"
            )


def build_trackers(names: Sequence[str], run: TrackedRun) -> list[Tracker]:
    """Start the trackers; a missing login or server raises ConfigError and closes those already started."""
    started: dict[str, Tracker] = {}
    try:
        for name in names:
            module, _, kind = TRACKERS[name].partition(":")
            started[name] = getattr(importlib.import_module(module), kind)(run, name)
    except BaseException:
        for tracker in started.values():
            tracker.close(is_failed=True)
        raise
    return list(started.values())
