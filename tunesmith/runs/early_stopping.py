"""When a run ends early, and which of its steps is best, from the series of one metric.

Both are functions of the metrics in metrics.jsonl, so a resumed run adds the recorded ones again and decides as the
uninterrupted run does. A missing or non-finite value is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tunesmith.config import EarlyStoppingSection, KeepBestSection
from tunesmith.config.callbacks import EVAL_PREFIX, Mode
from tunesmith.errors import ConfigError
from tunesmith.monitor.metrics_file import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class BestValue:
    """The best value of a metric, and its step."""

    step: int
    value: float


class EarlyStopping:
    """Watches one metric; `reason` says why the run ends, None while it continues."""

    def __init__(self, section: EarlyStoppingSection) -> None:
        self._section = section
        self._best: BestValue | None = None
        self._num_since = 0
        self.reason: str | None = None

    def add(self, step: int, kind: Kind, metrics: Mapping[str, float | None]) -> None:
        """Add the metrics of a step or of an evaluation; raises ConfigError if the metric does not exist."""
        rule = self._section
        if self.reason is not None or kind != find_kind(rule.metric):
            return
        value = read_metric(metrics, rule.metric, knob="early_stopping", is_known=self._best is not None)
        if value is None:
            return
        if self._best is None or is_better(value, self._best.value, mode=rule.mode, min_delta=rule.min_delta):
            self._best, self._num_since = BestValue(step=step, value=value), 0
        else:
            self._num_since += 1
        if step > 0 and step >= rule.min_steps:
            self.reason = self._find_reason(value)

    def _find_reason(self, value: float) -> str | None:
        rule, best = self._section, self._best
        assert best is not None
        if rule.target is not None and not is_better(rule.target, value, mode=rule.mode):
            return f"{rule.metric} is {value:.6g}, and early_stopping.target is {rule.target:g}"
        if rule.patience is not None and self._num_since >= rule.patience:
            counted = "evaluations" if find_kind(rule.metric) == "eval" else "steps"
            return (
                f"{rule.metric} has not improved on {best.value:.6g} of step {best.step} in {self._num_since} "
                f"{counted} (early_stopping.patience={rule.patience})"
            )
        return None


class BestEvaluation:
    """The step with the best evaluation; of equal values the first."""

    def __init__(self, section: KeepBestSection) -> None:
        self.section = section
        self.best: BestValue | None = None
        self._has_value = False

    def add(self, step: int, kind: Kind, metrics: Mapping[str, float | None]) -> None:
        """Add the metrics of a step or of an evaluation; raises ConfigError if the metric does not exist. An evaluation
        before the first step has no checkpoint and does not count."""
        if kind != "eval":
            return
        value = read_metric(metrics, self.section.metric, knob="keep_best", is_known=self._has_value)
        if value is None:
            return
        self._has_value = True
        if step > 0 and (self.best is None or is_better(value, self.best.value, mode=self.section.mode)):
            self.best = BestValue(step=step, value=value)


def find_kind(metric: str) -> Kind:
    """Whether evaluations or training steps report a metric."""
    return "eval" if metric.startswith(EVAL_PREFIX) else "train"


def is_better(value: float, best: float, *, mode: Mode, min_delta: float = 0.0) -> bool:
    return value > best + min_delta if mode == "max" else value < best - min_delta


def read_metric(metrics: Mapping[str, float | None], metric: str, *, knob: str, is_known: bool) -> float | None:
    """The value, None if it is missing or not finite; ConfigError if no step has had it although it could.

    A step without an update, and an evaluation without a scored rollout, report fewer metrics.
    """
    value = metrics.get(metric)
    if value is not None:
        return value if math.isfinite(value) else None
    if metric in metrics or is_known:
        return None
    if find_kind(metric) == "eval":
        prefixes = [each.removesuffix("reward") for each in metrics if each.endswith("/reward")]
        is_complete = any(metric.startswith(prefix) for prefix in prefixes)
    else:
        is_complete = bool(metrics.get("train/num_updates"))
    if is_complete:
        near = [each for each in metrics if each.split("/")[0] == metric.split("/")[0]] or list(metrics)
        raise ConfigError(f"{knob}.metric={metric!r} is not reported; available: {', '.join(near)}")
    return None
