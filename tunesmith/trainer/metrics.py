"""The numbers of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tunesmith.errors import TrainingError

SUMMED_LOSSES = ("loss", "pg_loss")
"""Totals that are sums of weighted losses already; the others are sums over tokens."""
MISMATCH = ("mismatch_kl", "max_log_ratio", "num_newest")
"""Totals of what the newest policy sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTotals:
    """Totals of P parts of the update, in one tensor under their K names."""

    names: tuple[str, ...]
    values_PK: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one optimizer update was made of."""

    totals: dict[str, float]
    """See `step.Totals`."""
    metrics: dict[str, float]
    """Of the scoring pass, under their own names."""
    grad_norm: float
    """Before clipping."""
    num_tokens: int
    num_flat_tokens: int
    num_trained_tokens: int

    @property
    def mismatch_kl(self) -> float | None:
        """Estimate of KL(sampler || trainer), a mean over what the newest policy sampled; None if that is nothing."""
        num_newest = self.totals.get("num_newest", 0.0)
        return self.totals["mismatch_kl"] / num_newest if num_newest else None


def check_finite(update: Update) -> None:
    """Raise TrainingError when the loss or the gradient is not a number to follow."""
    loss = update.totals["loss"]
    if not math.isfinite(loss) or not math.isfinite(update.grad_norm):
        raise TrainingError(
            f"the loss is {loss:g} and the norm of its gradient is {update.grad_norm:g}: no update was made; "
            "lower trainer.learning_rate, or try model.dtype=float32"
        )


def build_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Metrics of a step: losses are means over its updates, per-token quantities means over its trained tokens.

    The mismatch is that of the first update's tokens, scored before anything changed. What the scoring pass reports is
    averaged over the updates that report it, and counts (`num_...`) are added up.
    """
    num_trained_tokens = sum(update.num_trained_tokens for update in updates)
    metrics = {
        "train/num_updates": float(len(updates)),
        "train/num_tokens": float(sum(update.num_tokens for update in updates)),
        "train/num_flat_tokens": float(sum(update.num_flat_tokens for update in updates)),
        "train/num_trained_tokens": float(num_trained_tokens),
    }
    if not updates:
        return metrics
    metrics["train/grad_norm"] = sum(update.grad_norm for update in updates) / len(updates)
    for name in updates[0].totals:
        values = [update.totals[name] for update in updates]
        if name in SUMMED_LOSSES:
            metrics[f"train/{name}"] = sum(values) / len(updates)
        elif name not in MISMATCH:
            metrics[f"train/{name}"] = sum(values) / num_trained_tokens
    for name in dict.fromkeys(name for update in updates for name in update.metrics):
        values = [update.metrics[name] for update in updates if name in update.metrics]
        is_count = name.rpartition("/")[2].startswith("num_")
        metrics[name] = sum(values) if is_count else sum(values) / len(values)
    if updates[0].mismatch_kl is not None:
        metrics["mismatch/kl"] = updates[0].mismatch_kl
        metrics["mismatch/max_log_ratio"] = updates[0].totals["max_log_ratio"]
    return metrics
