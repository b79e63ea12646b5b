"""Staleness of sampled tokens: policy versions between the weights that sampled a token and those that train on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

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
    metrics = {"staleness/num_mixed_turns": float(sum(len(set(versions)) > 1 for versions in turns))}
    counts: Counter[int] = Counter()
    for versions in turns:
        counts.update(versions)
    if counts:
        lags = {policy_version - version: number for version, number in counts.items()}
        num_tokens = counts.total()
        metrics["staleness/mean"] = sum(lag * number for lag, number in lags.items()) / num_tokens
        metrics["staleness/max"] = float(max(lags))
        metrics["staleness/stale_frac"] = 1 - lags.get(0, 0) / num_tokens
    return metrics


def _iter_trained_versions(
    groups: Sequence[Group], advantages: Sequence[Sequence[RunAdvantage]]
) -> Iterator[tuple[int, ...]]:
    """The policy versions of each turn that is trained."""
    for group, row in zip(groups, advantages, strict=True):
        for run, advantage in zip(group.trajectories, row, strict=True):
            if advantage is not None:
                yield from (turn.policy_versions for turn in run.turns if turn.is_trained)
