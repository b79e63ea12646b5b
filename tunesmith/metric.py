"""Metric values whose type defines their reduction.

Each update of a step and each round of a batch reports metrics. `merge_metrics` averages plain floats and sums
`Count`s, takes the maximum of `Max` and the minimum of `Min`, and weighs a `Mean` by its number of observations. All
types are floats, so a dict of metrics is a `dict[str, float]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self


class Count(float):
    """Reduced by sum."""

    __slots__ = ()


class Max(float):
    """Reduced by maximum."""

    __slots__ = ()


class Min(float):
    """Reduced by minimum."""

    __slots__ = ()


class Mean(float):
    """A mean over `num_observations`; reduced by the mean weighted with these."""

    __slots__ = ("num_observations",)
    num_observations: float

    def __new__(cls, total: float, *, over: float) -> Self:
        mean = super().__new__(cls, total / over)
        mean.num_observations = over
        return mean


def merge_metrics(parts: Sequence[Mapping[str, float]], *, weights: Sequence[float] | None = None) -> dict[str, float]:
    """Merge metrics by name, each over the parts that report it; `weights` are for plain floats and default to 1."""
    weights = [1.0] * len(parts) if weights is None else weights
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        reported = [(part[name], weight) for part, weight in zip(parts, weights, strict=True) if name in part]
        merged[name] = float(_merge(name, [value for value, _ in reported], [weight for _, weight in reported]))
    return merged


def _merge(name: str, values: Sequence[float], weights: Sequence[float]) -> float:
    kinds: set[type[float]] = {
        type(value) if isinstance(value, Count | Max | Min | Mean) else float for value in values
    }
    assert len(kinds) == 1, f"{name} is reported with different reductions: {kinds}"
    if Count in kinds:
        return sum(values)
    if Max in kinds:
        return max(values)
    if Min in kinds:
        return min(values)
    if len(values) == 1:
        return values[0]
    if Mean in kinds:
        weights = [value.num_observations for value in values if isinstance(value, Mean)]
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
