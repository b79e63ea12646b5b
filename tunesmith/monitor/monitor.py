"""The monitor: one `log` call per step, fanned out to metrics.jsonl, the trackers and the console."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from tunesmith.config import MonitorSection
from tunesmith.monitor.console import ConsoleProgress
from tunesmith.monitor.metrics_file import Kind, append_metrics, trim_metrics
from tunesmith.monitor.tracker import TrackedRun, build_trackers, flatten
from tunesmith.storage import RunPaths


class Monitor:
    """Logs the metrics of one run. A resumed run passes its `committed_step`; None is a new run.

    Trackers list `run_settings` as hyperparameters. They are started here; one that cannot start raises ConfigError.
    """

    def __init__(
        self,
        root: Path,
        settings: MonitorSection,
        *,
        total_steps: int,
        committed_step: int | None = None,
        run_settings: Mapping[str, Any] | None = None,
        stream: IO[str] | None = None,
    ) -> None:
        self._path = RunPaths(root).metrics
        trim_metrics(self._path, committed_step=committed_step)
        flat = {key: str(value) for key, value in flatten(run_settings or {}).items()}
        run = TrackedRun(root=root, committed_step=committed_step, settings=flat)
        self._trackers = build_trackers(settings.trackers, run)
        self._console = ConsoleProgress(
            first_step=committed_step or 0,
            total_steps=total_steps,
            has_progress=settings.has_progress,
            log_interval_steps=settings.log_interval_steps,
            more_metrics=settings.console_metrics,
            stream=stream,
        )

    def log(self, step: int, kind: Kind, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a training step or of an evaluation after it."""
        append_metrics(self._path, step, kind, metrics)
        for tracker in self._trackers:
            tracker.log(step, metrics)
        if kind == "train":
            self._console.show_train(step, metrics)
        else:
            self._console.show_eval(step, metrics)

    def show_status(self, text: str) -> None:
        """Show the current activity within a step, on a terminal only."""
        self._console.show_status(text)

    def show_line(self, text: str) -> None:
        self._console.show_line(text)

    def close(self, *, is_failed: bool = False) -> None:
        """Close the console, and the trackers with the outcome of the run, each also if another one fails."""
        with ExitStack() as closing:
            for tracker in reversed(self._trackers):
                closing.callback(tracker.close, is_failed=is_failed)
            closing.callback(self._console.close)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(is_failed=kind is not None)
