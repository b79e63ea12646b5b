"""Weights & Biases tracker: one W&B run per run.

WANDB_MODE is online (the default, needs a login) or offline (uploaded later by `wandb sync`). W&B keeps the first
record of a step, so steps that a killed run logged after its last commit are not overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping

import wandb

from tunesmith.errors import ConfigError
from tunesmith.monitor.tracker import TrackedRun, choose_run_id
from tunesmith.storage import RunPaths, storage_errors


class WandbTracker:
    """Logs to a W&B run whose files are in the run folder."""

    def __init__(self, run: TrackedRun) -> None:
        folder = RunPaths(run.root).monitor
        with storage_errors(folder, "write"):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=run.project,
                name=run.name,
                id=choose_run_id(run.root, "wandb", is_resumed=run.committed_step is not None),
                resume="allow",
                dir=str(folder),
                config=dict(run.settings),
                settings=wandb.Settings(console="off"),
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"monitor.trackers: wandb cannot start: {' '.join(str(error).split())} "
                "(WANDB_MODE=offline needs no login)"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, *, is_failed: bool) -> None:
        self._run.finish(exit_code=int(is_failed))
