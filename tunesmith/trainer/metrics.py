"""Metrics of an update and of a step."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from tunesmith.algorithms.scores import TokenInputs
from tunesmith.cluster.ranks import Ranks
from tunesmith.config import TrainerSection
from tunesmith.errors import TrainingError
from tunesmith.experience.samples import Trie
from tunesmith.metric import Count, Max, Mean, merge_metrics

V = TypeVar("V")
logger = logging.getLogger(__name__)

MISMATCH_CAUSES = (
    "likely causes: sampling settings that the trainer does not apply, weights changed between sampling and training, "
    "KV-cache entries of older weights in the engine, or 16-bit precision too low for this model (try "
    "model.residual_dtype=float32, or model.dtype=float32)"
)
Reduction = Literal["sum", "max", "sampled_mean", "newest_mean", "newest_max"]
"""How a total of an update becomes a metric: `sum`, a sum of weight times token loss, as it is; `max`, the maximum over
ranks; `sampled_mean`, a sum over the tokens that are not an expert's, divided by their number; `newest_mean`, the same
over the tokens that the newest policy sampled; `newest_max`, the maximum over these."""


Total = tuple[Reduction, V]
"""A sum (or maximum) over the tokens of an update: on the device of one rank, or on the host over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTotals:
    """K totals of P parts of the update, in one tensor."""

    reductions: tuple[tuple[str, Reduction], ...]
    """Names and reductions of the K totals."""
    values_PK: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Numbers of tokens that the totals of an update are over."""

    num_sampled: int
    """All but expert tokens."""
    num_newest: int
    """Sampled by the newest policy."""


def add_parts(parts: Sequence[PartTotals]) -> dict[str, Total[Tensor]]:
    """Totals of the update by name."""
    values_PK = torch.cat([part.values_PK for part in parts])
    columns = zip(parts[0].reductions, values_PK.sum(dim=0).unbind(), values_PK.amax(dim=0).unbind(), strict=True)
    return {
        name: (reduction, maximum if reduction == "newest_max" else total)
        for (name, reduction), total, maximum in columns
    }


def count_tokens(inputs: TokenInputs) -> TokenCounts:
    assert inputs.is_newest_E is not None
    return TokenCounts(num_sampled=int(inputs.find_sampled().sum()), num_newest=int(inputs.is_newest_E.sum()))


def count_row_tokens(rows: Sequence[Trie], ranks: Ranks = Ranks()) -> dict[str, float]:
    """Numbers of tokens computed (shared prefixes once), of tokens in the samples, and of trained tokens."""
    own = (
        sum(row.num_tokens for row in rows),
        sum(row.num_flat_tokens for row in rows),
        sum(len(row.parent_E) for row in rows),
    )
    computed, flat, trained = map(sum, zip(*ranks.all_gather_objects(own), strict=True))
    return {
        "train/num_tokens": Count(computed),
        "train/num_flat_tokens": Count(flat),
        "train/num_trained_tokens": Count(trained),
    }


def read_totals(totals: Mapping[str, Total[Tensor]], values: Sequence[float], ranks: Ranks) -> dict[str, Total[float]]:
    """The totals over all ranks from those of this rank and their values on the host."""
    own = {name: (reduction, value) for (name, (reduction, _)), value in zip(totals.items(), values, strict=True)}
    merged: dict[str, Total[float]] = {}
    for part in ranks.all_gather_objects(own):
        for name, (reduction, value) in part.items():
            combine = max if reduction in ("max", "newest_max") else sum
            merged[name] = (reduction, combine([merged[name][1], value]) if name in merged else value)
    return merged


def build_token_metrics(totals: Mapping[str, Total[float]], counts: TokenCounts, *, is_first: bool) -> dict[str, float]:
    """Metrics of an update from its totals.

    A mean over no tokens is not reported. The mismatch of sampler and trainer is reported for the first update of a
    step only, before the parameters change.
    """
    num_newest = counts.num_newest if is_first else 0
    metrics: dict[str, float] = {}
    for name, (reduction, value) in totals.items():
        if reduction == "sum":
            metrics[name] = value
        elif reduction == "max" or (reduction == "newest_max" and num_newest):
            metrics[name] = Max(value)
        elif reduction == "sampled_mean" and counts.num_sampled:
            metrics[name] = Mean(value, over=counts.num_sampled)
        elif reduction == "newest_mean" and num_newest:
            metrics[name] = Mean(value, over=num_newest)
    return metrics


def check_finite(metrics: Mapping[str, float]) -> None:
    loss, grad_norm = metrics["train/loss"], metrics["train/grad_norm"]
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        raise TrainingError(
            f"the loss is {loss:g} and the norm of its gradient is {grad_norm:g}: no update was made; "
            "lower trainer.learning_rate, or try model.dtype=float32"
        )


def check_mismatch(metrics: Mapping[str, float], limits: TrainerSection, *, has_console: bool = True) -> None:
    """Warn or raise TrainingError if sampler and trainer logprobs differ by more than the limits; of several ranks one
    has the console."""
    mismatch = metrics.get("mismatch/kl")
    if mismatch is None:
        return
    if mismatch > limits.mismatch_stop:
        raise TrainingError(
            f"sampler and trainer logprobs differ: KL {mismatch:.3g} per token is above "
            f"trainer.mismatch_stop={limits.mismatch_stop:g}; {MISMATCH_CAUSES}"
        )
    if mismatch > limits.mismatch_warn and has_console:
        logger.warning(
            "sampler and trainer logprobs differ: KL %.3g per token is above trainer.mismatch_warn=%g; %s",
            mismatch, limits.mismatch_warn, MISMATCH_CAUSES,
        )  # fmt: skip


def build_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a step from those of its updates; `metric` defines how they are reduced."""
    return merge_metrics([{"train/num_updates": Count(len(updates))} | count_row_tokens([]), *updates])
