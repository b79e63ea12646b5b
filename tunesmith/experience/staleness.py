"""Staleness of sampled tokens: policy versions between the weights that sampled a token and those that train on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

from tunesmith.types import Group, RunAdvantage, Trajectory


def find_oldest_version(trajectories: Iterable[Trajectory]) -> int | None:
    """Policy version of the oldest sampled token; None if nothing was sampled."""
    versions = (turn.policy_versions for run in trajectories for turn in run.turns)
    return min((min(each) for each in versions if each), default=None)


def compute_staleness(
    groups: Sequence[Group], advantages: Sequence[Sequence[RunAdvantage]], *, policy_version: int
) -> dict[str, float]:
    """Mean and maximum staleness of the trained tokens in policy versions, and the turns of several versions."""
    turns = list(_iter_trained_versions(groups, advantages))
    lags = [policy_version - version for versions in turns for version in versions]
    metrics = {"staleness/num_mixed_turns": float(sum(len(set(versions)) > 1 for versions in turns))}
    if lags:
        metrics |= {"staleness/mean": fmean(lags), "staleness/max": float(max(lags))}
        metrics["staleness/stale_frac"] = sum(lag > 0 for lag in lags) / len(lags)
    return metrics


def _iter_trained_versions(
    groups: Sequence[Group], advantages: Sequence[Sequence[RunAdvantage]]
) -> Iterator[tuple[int, ...]]:
    """The policy versions of each turn that is trained."""
    for group, row in zip(groups, advantages, strict=True):
        for run, advantage in zip(group.trajectories, row, strict=True):
            if advantage is not None:
                yield from (turn.policy_versions for turn in run.turns if turn.is_trained)
