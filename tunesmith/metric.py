"""Numbers that know how they combine with others of the same name.

The updates of a step and the rounds of a batch each report numbers. A plain float is averaged over them; whoever
measures something else says so by its type. The types are floats, so a dict of metrics stays a dict of floats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self


class Count(float):
    """Adds up."""

    __slots__ = ()


class Largest(float):
    """The largest one stays."""

    __slots__ = ()


class Smallest(float):
    """The smallest one stays."""

    __slots__ = ()


class Mean(float):
    """A mean over so many observations, by which it is weighed against others."""

    __slots__ = ("num_observations",)
    num_observations: float

    def __new__(cls, total: float, *, over: float) -> Self:
        mean = super().__new__(cls, total / over)
        mean.num_observations = over
        return mean


def merge_metrics(parts: Sequence[Mapping[str, float]], *, weights: Sequence[float] | None = None) -> dict[str, float]:
    """The numbers of all parts as one, each over the parts that report it; plain floats are weighed by `weights`."""
    weights = [1.0] * len(parts) if weights is None else weights
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        given = [(part[name], weight) for part, weight in zip(parts, weights, strict=True) if name in part]
        merged[name] = float(_merge(name, [value for value, _ in given], [weight for _, weight in given]))
    return merged


def _merge(name: str, values: Sequence[float], weights: Sequence[float]) -> float:
    kinds: set[type[float]] = {
        type(value) if isinstance(value, Count | Largest | Smallest | Mean) else float for value in values
    }
    assert len(kinds) == 1, f"{name} combines in different ways: {kinds}"
    if Count in kinds:
        return sum(values)
    if Largest in kinds:
        return max(values)
    if Smallest in kinds:
        return min(values)
    if len(values) == 1:
        return values[0]
    if Mean in kinds:
        weights = [value.num_observations for value in values if isinstance(value, Mean)]
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
