"""Experiment trackers: TensorBoard, Weights & Biases, MLflow and SwanLab.

Each receives every metric under the same name, and the run's settings. TensorBoard writes into the run folder; the
others are configured by their own environment variables (WANDB_MODE, MLFLOW_TRACKING_URI, SWANLAB_MODE). A resumed run
keeps its tracker id, which is saved in the run folder; a new run gets a new one.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence

from tunesmith.errors import ConfigError
from tunesmith.monitor.tracker import TrackedRun, Tracker

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
