"""Checks of supervised fine-tuning and preference training."""

from __future__ import annotations

import numpy as np

from tunesmith.commands.doctor.finding import Finding, Outcome, Passed, format_settings, observe
from tunesmith.commands.doctor.record import OfflineRun
from tunesmith.commands.doctor.series import compute_slope_t, split_ends

MIN_LOSS_FALL = 0.05
"""A loss that falls by less than a twentieth has learned next to nothing."""
RISEN_T = 3.0
OVERFIT_RISE = 0.02
"""Share by which the evaluation loss exceeds its lowest value at the end."""


def find_loss_trend(run: OfflineRun) -> Outcome:
    """A training loss that rises or does not fall."""
    series = run.get("train/loss")
    ends = None if series is None else split_ends(series)
    if series is None or ends is None:
        return None
    first, last = ends
    rate = run.config.trainer.learning_rate
    observed = f"{first.mean:.3g} in the first steps, {last.mean:.3g} in the last"
    if last.mean > first.mean and compute_slope_t(series) > RISEN_T:
        problem, settings = "the training loss rises", {"trainer.learning_rate": rate / 10}
    elif last.mean > (1 - MIN_LOSS_FALL) * first.mean:
        problem, settings = "the training loss hardly falls", {"trainer.learning_rate": rate * 3}
    else:
        return Passed(check="loss", figure=observed)
    return Finding(
        check="loss",
        severity="warning",
        problem=problem,
        evidence=(observe(series, observed, last.mean),),
        change=f"set {format_settings(settings)}, or train longer with num_epochs={run.config.num_epochs + 1}",
        settings=settings,
    )


def find_evaluation_loss(run: OfflineRun) -> Outcome:
    """An evaluation loss that rises again: overfitting."""
    series = run.metrics.get("eval/loss", "eval")
    if series is None or len(series.finite) < 2:
        return None
    series = series.finite
    best, last = int(np.argmin(series.values)), float(series.values[-1])
    lowest = float(series.values[best])
    observed = f"{lowest:.4g} at step {series.steps[best]}, {last:.4g} at step {series.steps[-1]}"
    if last <= (1 + OVERFIT_RISE) * lowest:
        return Passed(check="evaluation-loss", figure=observed)
    settings = {"num_epochs": max(1, run.config.num_epochs - 1)}
    return Finding(
        check="evaluation-loss",
        severity="note",
        problem=f"the model overfits after step {series.steps[best]}, whose weights are kept",
        evidence=(observe(series, observed, last),),
        change=f"set {format_settings(settings)}, lower trainer.learning_rate, or add rows",
        settings=settings,
    )
