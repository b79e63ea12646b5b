"""The numbers of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tunesmith.algorithms.scores import TokenInputs
from tunesmith.errors import TrainingError
from tunesmith.experience.trie import Trie
from tunesmith.metric import Count, Largest, Mean, merge_metrics

Kind = Literal["loss", "own", "newest", "largest_newest"]
"""What a total of an update is: `loss`, a sum of weight times token loss; `own`, a sum over the tokens that are no
experts'; `newest`, a sum over the tokens that the newest policy sampled; `largest_newest`, the largest value there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """A quantity of an update, on its device."""

    kind: Kind
    value: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTotals:
    """Totals of P parts of the update, in one tensor."""

    kinds: tuple[tuple[str, Kind], ...]
    """Names and kinds of the K totals."""
    values_PK: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """How many tokens the totals of an update are over."""

    num_own: int
    """Not given by experts."""
    num_newest: int
    """Sampled by the newest policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one optimizer update was made of."""

    metrics: dict[str, float]
    """See `metric` for how they combine over updates."""
    grad_norm: float
    """Before clipping."""

    @property
    def mismatch_kl(self) -> float | None:
        """Estimate of KL(sampler || trainer), a mean over what the newest policy sampled; None if that is nothing."""
        return self.metrics.get("mismatch/kl")


def add_parts(parts: Sequence[PartTotals]) -> dict[str, Total]:
    """The totals of a whole update by name."""
    values_PK = torch.cat([part.values_PK for part in parts])
    found = zip(parts[0].kinds, values_PK.sum(dim=0).unbind(), values_PK.amax(dim=0).unbind(), strict=True)
    return {
        name: Total(kind=kind, value=most if kind == "largest_newest" else total) for (name, kind), total, most in found
    }


def count_tokens(inputs: TokenInputs[np.ndarray]) -> TokenCounts:
    """Of an update's inputs."""
    num_experts = 0 if inputs.is_expert_E is None else int(inputs.is_expert_E.sum())
    return TokenCounts(num_own=len(inputs.weights_E) - num_experts, num_newest=int(inputs.is_newest_E.sum()))


def count_row_tokens(rows: Sequence[Trie]) -> dict[str, float]:
    """Tokens that rows compute, tokens of the samples in them, and tokens that train."""
    return {
        "train/num_tokens": Count(sum(row.num_tokens for row in rows)),
        "train/num_flat_tokens": Count(sum(row.num_flat_tokens for row in rows)),
        "train/num_trained_tokens": Count(sum(len(row.parent_E) for row in rows)),
    }


def build_token_metrics(
    totals: Mapping[str, Total], values: Sequence[float], counts: TokenCounts, *, is_first: bool
) -> dict[str, float]:
    """Metrics of an update from its totals, whose values have been read: losses as they are, sums as means.

    What there are no tokens of is not reported. The mismatch of sampler and trainer is that of a step's first update,
    before anything changed.
    """
    num_newest = counts.num_newest if is_first else 0
    metrics: dict[str, float] = {}
    for (name, total), value in zip(totals.items(), values, strict=True):
        if total.kind == "loss":
            metrics[name] = value
        elif total.kind == "own" and counts.num_own:
            metrics[name] = Mean(value, over=counts.num_own)
        elif total.kind == "newest" and num_newest:
            metrics[name] = Mean(value, over=num_newest)
        elif total.kind == "largest_newest" and num_newest:
            metrics[name] = Largest(value)
    return metrics


def check_finite(update: Update) -> None:
    """Raise TrainingError when the loss or the gradient is not a number to follow."""
    loss = update.metrics["train/loss"]
    if not math.isfinite(loss) or not math.isfinite(update.grad_norm):
        raise TrainingError(
            f"the loss is {loss:g} and the norm of its gradient is {update.grad_norm:g}: no update was made; "
            "lower trainer.learning_rate, or try model.dtype=float32"
        )


def build_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Metrics of a step from those of its updates."""
    counts = {"train/num_updates": Count(len(updates))} | count_row_tokens([])
    return merge_metrics([counts, *(update.metrics for update in updates)])
