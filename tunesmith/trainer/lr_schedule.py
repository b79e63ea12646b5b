"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from tunesmith.config import TrainerSection


def compute_learning_rate(settings: TrainerSection, *, step: int, num_total_steps: int) -> float:
    """Learning rate of step 0, 1, ...

    Linear warm-up from 0 (exclusive) to the peak at the first step after the warm-up. The cosine schedule then decays
    to `min_lr_ratio` times the peak at step `num_total_steps`, one after the last.
    """
    num_warmup_steps = compute_warmup_steps(settings, num_total_steps=num_total_steps)
    if step < num_warmup_steps:
        return settings.learning_rate * (step + 1) / (num_warmup_steps + 1)
    if settings.schedule == "constant":
        return settings.learning_rate
    progress = min((step - num_warmup_steps) / max(num_total_steps - num_warmup_steps, 1), 1.0)
    share = settings.min_lr_ratio + (1 - settings.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2
    return settings.learning_rate * share


def compute_warmup_steps(settings: TrainerSection, *, num_total_steps: int) -> int:
    """Number of warm-up steps: `warmup_steps`, or `warmup_ratio` times all steps."""
    return settings.warmup_steps or math.ceil(settings.warmup_ratio * num_total_steps)
