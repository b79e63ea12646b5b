"""One `log` call a step, fanned out to metrics.jsonl, the trackers and the console under the same names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Protocol

from tunesmith.config import MonitorSection
from tunesmith.monitor.console import ConsoleProgress
from tunesmith.monitor.metrics_file import Kind, MetricsFile
from tunesmith.monitor.tensorboard import TensorBoardTracker
from tunesmith.storage import RunPaths


class Tracker(Protocol):
    """A place outside the run folder's own files that keeps metrics by step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def build_tensorboard(root: Path, committed_step: int | None) -> Tracker:
    return TensorBoardTracker(RunPaths(root).tensorboard, committed_step=committed_step)


TRACKERS: Mapping[str, Callable[[Path, int | None], Tracker]] = {
    "tensorboard": build_tensorboard,
}
"""Names that `monitor.trackers` may list: what builds one from the run's folder and its last committed step."""


class Monitor:
    """The numbers of one run. `committed_step` is where it goes on, None when it begins anew."""

    def __init__(
        self,
        root: Path,
        settings: MonitorSection,
        *,
        total_steps: int,
        committed_step: int | None = None,
        stream: IO[str] | None = None,
    ) -> None:
        self._file = MetricsFile(RunPaths(root).metrics, committed_step=committed_step)
        self._trackers = [TRACKERS[name](root, committed_step) for name in settings.trackers]
        self._console = ConsoleProgress(
            first_step=committed_step or 0,
            total_steps=total_steps,
            has_progress=settings.has_progress,
            log_interval_steps=settings.log_interval_steps,
            stream=stream,
        )

    def log(self, step: int, kind: Kind, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a training step or of an evaluation after it."""
        self._file.append(step, kind, metrics)
        for tracker in self._trackers:
            tracker.log(step, metrics)
        if kind == "train":
            self._console.show_train(step, metrics)
        else:
            self._console.show_eval(step, metrics)

    def show_status(self, text: str) -> None:
        """Say what the run is doing within its step; only a terminal shows it."""
        self._console.show_status(text)

    def show_line(self, text: str) -> None:
        """Print a line on the console."""
        self._console.show_line(text)

    def close(self) -> None:
        """Stop the display and finish the files."""
        self._console.close()
        for tracker in self._trackers:
            tracker.close()
        self._file.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
