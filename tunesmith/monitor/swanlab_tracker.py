"""SwanLab tracker: one SwanLab experiment per run.

SWANLAB_MODE is online (the default, needs a login), local (shown by `swanlab watch`) or offline (uploaded later by
`swanlab sync`). SwanLab keeps the first record of a step.
"""

from __future__ import annotations

from collections.abc import Mapping

import swanlab

from tunesmith.errors import ConfigError
from tunesmith.monitor.tracker import TrackedRun, choose_run_id
from tunesmith.storage import RunPaths, storage_errors


class SwanlabTracker:
    """Logs to a SwanLab experiment whose files are in the run folder."""

    def __init__(self, run: TrackedRun) -> None:
        folder = RunPaths(run.root).monitor / "swanlab"
        with storage_errors(folder, "write"):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = swanlab.init(
                project=run.project,
                name=run.name,
                id=choose_run_id(run.root, "swanlab", is_resumed=run.committed_step is not None),
                resume="allow",
                log_dir=str(folder),
                config=dict(run.settings),
                settings=swanlab.Settings(terminal=swanlab.Settings.Terminal(proxy_type="none")),
            )
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"monitor.trackers: swanlab cannot start: {' '.join(str(error).split())} "
                "(SWANLAB_MODE=local needs no login)"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, *, is_failed: bool) -> None:
        self._run.finish(state="crashed" if is_failed else "success")
