"""Trackers with one record of a run that is opened by `init`: Weights & Biases and SwanLab.

WANDB_MODE is online (the default, needs a login) or offline (uploaded later by `wandb sync`). SWANLAB_MODE is online,
local (shown by `swanlab watch`) or offline (uploaded later by `swanlab sync`). Both keep the first record of a step, so
steps that a killed run logged after its last commit are not overwritten.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Mapping
from typing import Any

from tunesmith.errors import ConfigError
from tunesmith.monitor.tracker import TrackedRun
from tunesmith.storage import RunPaths, storage_errors


class HostedTracker:
    """Logs to a run of the library `name`, whose files are in the run folder."""

    def __init__(self, run: TrackedRun, name: str) -> None:
        self._name, library = name, importlib.import_module(name)
        folder = RunPaths(run.root).monitor
        options: dict[str, Any]
        if name == "wandb":
            errors, advice = library.errors.Error, "WANDB_MODE=offline needs no login"
            options = {"dir": str(folder), "settings": library.Settings(console="off")}
        else:
            errors, advice = (RuntimeError, ValueError), "SWANLAB_MODE=local needs no login"
            folder = folder / name
            terminal = library.Settings.Terminal(proxy_type="none")
            options = {"log_dir": str(folder), "settings": library.Settings(terminal=terminal)}
        with storage_errors(folder, "write"):
            folder.mkdir(parents=True, exist_ok=True)
        run_id = run.load_id(name) or secrets.token_hex(8)
        run.save_id(name, run_id)
        try:
            self._run = library.init(
                project=run.project,
                name=run.name,
                id=run_id,
                resume="allow",
                config=dict(run.settings),
                **options,
            )
        except errors as error:
            raise ConfigError(
                f"monitor.trackers: {name} cannot start: {' '.join(str(error).split())} ({advice})"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, *, is_failed: bool) -> None:
        if self._name == "wandb":
            self._run.finish(exit_code=int(is_failed))
        else:
            self._run.finish(state="crashed" if is_failed else "success")
