"""What happens between the steps of a run: early stopping, the best checkpoint, callbacks.

All of it follows from the metrics on disk, except what callbacks return. So a resumed run replays metrics.jsonl up to
its checkpoint and then decides as the uninterrupted run does. A run that a callback ended continues when it is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tunesmith.commands.eval.results import EvaluationResult
from tunesmith.commands.tune.callbacks import (
    Callbacks,
    CheckpointEnd,
    EvaluationEnd,
    RunEvent,
    StepEnd,
    Stop,
    call_callback,
)
from tunesmith.config import EarlyStoppingSection, KeepBestSection
from tunesmith.errors import CallbackError, ConfigError, TunesmithError
from tunesmith.loop import StepResult
from tunesmith.monitor.metrics_file import Kind, load_metrics
from tunesmith.runs.early_stopping import BestEvaluation, BestValue, EarlyStopping
from tunesmith.storage import RunPaths, save_json, save_link, storage_errors


class RunControl:
    """Decides after each step whether the run ends and whether the step is saved; calls the callbacks."""

    def __init__(
        self,
        early_stopping: EarlyStoppingSection | None,
        keep_best: KeepBestSection | None,
        callbacks: Callbacks,
        paths: RunPaths,
        *,
        total_steps: int,
    ) -> None:
        self._callbacks = callbacks
        self._paths = paths
        self._total_steps = total_steps
        self._early = None if early_stopping is None else EarlyStopping(early_stopping)
        self._best = None if keep_best is None else BestEvaluation(keep_best)
        self.stop: Stop | None = None
        """Why the run ends before its last step; None while it continues."""
        self._error: TunesmithError | None = None

    @property
    def best(self) -> BestValue | None:
        """The best evaluation so far; None without `keep_best`, or if there is none."""
        return None if self._best is None else self._best.best

    def replay(self, *, committed_step: int) -> None:
        """Add the recorded metrics of a resumed run; evaluations without a checkpoint cannot be the best."""
        for record in load_metrics(self._paths.metrics):
            kind: Kind = record["kind"]
            step, metrics = record["step"], {name: value for name, value in record.items() if "/" in name}
            if step > committed_step:
                continue
            if self._early is not None:
                self._early.add(step, kind, metrics)
            if self._best is not None and (step == 0 or self._paths.checkpoint(step).is_dir()):
                self._best.add(step, kind, metrics)
        if committed_step and self._early is not None and self._early.reason is not None:
            self.stop = Stop(self._early.reason)
        self.save_best()
        if self.stop is None:
            with storage_errors(self._paths.stopped, "remove"):
                self._paths.stopped.unlink(missing_ok=True)

    def is_last(self, step: int) -> bool:
        return step == self._total_steps or self.stop is not None

    def is_saved(self, step: int) -> bool:
        """Whether the step needs a checkpoint whatever `save_interval_steps` is."""
        is_best = self.best is not None and self.best.step == step
        return self.is_last(step) or is_best or self._error is not None

    async def end_step(self, step: int, result: StepResult) -> None:
        """Call `on_step_end` and check the metrics of the step."""
        self._add(step, "train", result.metrics)
        if "on_step_end" in self._callbacks:
            advantages = result.batch.spread(result.advantages)
            record = StepEnd(
                **self._place(step),
                metrics=MappingProxyType(result.metrics),
                groups=tuple(result.batch.collected),
                advantages=tuple(map(tuple, advantages)),
            )
            await self._call("on_step_end", record)

    async def end_evaluation(
        self, step: int, results: Mapping[str, EvaluationResult], metrics: Mapping[str, float]
    ) -> None:
        """Call `on_evaluation` and check the metrics of the evaluation."""
        self._add(step, "eval", metrics)
        if "on_evaluation" in self._callbacks:
            record = EvaluationEnd(
                **self._place(step), metrics=MappingProxyType(dict(metrics)), results=MappingProxyType(dict(results))
            )
            await self._call("on_evaluation", record)

    async def end_checkpoint(self, step: int) -> None:
        if "on_checkpoint" in self._callbacks:
            record = CheckpointEnd(
                **self._place(step),
                path=self._paths.checkpoint(step),
                is_best=self.best is not None and self.best.step == step,
                is_last=self.is_last(step),
            )
            await call_callback(self._callbacks["on_checkpoint"], record, name="on_checkpoint")

    def save_best(self) -> None:
        """Write `best.json` and the link `best`, or remove them if no evaluation is the best."""
        link, file = self._paths.best, self._paths.best_record
        if self._best is None or self.best is None:
            with storage_errors(link, "remove"):
                file.unlink(missing_ok=True)
                link.unlink(missing_ok=True)
            return
        section, checkpoint = self._best.section, self._paths.checkpoint(self.best.step).name
        record = {"metric": section.metric, "mode": section.mode, "value": self.best.value, "step": self.best.step}
        save_json(file, record)
        save_link(link, checkpoint)

    def find_stop_reason(self, step: int) -> str | None:
        """Why the run ended after `step`, if there were more steps to run."""
        return None if self.stop is None or step >= self._total_steps else self.stop.reason

    def save_ending(self, step: int, *, first_step: int) -> str | None:
        """Record in `stopped.json` why the run ended before its last step; returns the console line."""
        reason = self.find_stop_reason(step)
        if reason is None:
            return None
        save_json(self._paths.stopped, {"step": step, "reason": reason})
        line = f"ended early, after step {step} of {self._total_steps}: {reason}"
        return f"{line}; to continue it, change early_stopping" if first_step == step else line

    def raise_error(self) -> None:
        """Raise the error of a callback or of a metric's name, which waits until the step is saved."""
        if self._error is not None:
            raise self._error

    def _place(self, step: int) -> dict[str, Any]:
        return {"step": step, "total_steps": self._total_steps, "folder": self._paths.root}

    async def _call(self, name: str, record: RunEvent) -> None:
        try:
            stop = await call_callback(self._callbacks[name], record, name=name)
        except CallbackError as error:
            self._error = self._error or error
        else:
            self.stop = self.stop or stop

    def _add(self, step: int, kind: Kind, metrics: Mapping[str, float]) -> None:
        for series in (self._early, self._best):
            if series is not None:
                try:
                    series.add(step, kind, metrics)
                except ConfigError as error:
                    self._error = self._error or error
        if step > 0 and self._early is not None and self._early.reason is not None:
            self.stop = self.stop or Stop(self._early.reason)
