"""Advantages from several rewards of a rollout: the metrics that the judge reports beside the reward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pydantic import PositiveFloat

from tunesmith.algorithms.advantages.group import (
    Advantages,
    RunOutcome,
    map_scored,
    normalize_over_batch,
    standardize,
)
from tunesmith.errors import ConfigError
from tunesmith.types import are_equal


def compute_gdpo_advantages(
    groups: Sequence[Sequence[RunOutcome]],
    *,
    rewards: dict[str, float] | None = None,
    epsilon: PositiveFloat = 1e-6,
) -> Advantages:
    """Each reward normalized within the group, then their weighted sum over the batch (Liu et al., 2026, GDPO).

    `rewards` maps names of metrics to weights. A rollout has w_1 A_1 + ... + w_m A_m with A_j = (r_j - mean) /
    (std + epsilon) over the group, divided by the std + epsilon of this sum over all rollouts of the step. GRPO on the
    weighted sum of rewards gives rollouts with different rewards but equal sums the same advantage, and lets the reward
    of largest variance dominate. Stds are sample stds (ddof 1), as in TRL (`normalize_then_sum`) and verl, which
    computes that of the batch over tokens. A group in which no reward differs is dropped. Rollouts without a reward are
    excluded; one with a reward but without a named metric is an error.
    """
    _check_weights(rewards)
    if rewards is None:
        if not groups:
            return []
        raise ConfigError(f"algorithm_type='gdpo' needs {NEEDED_REWARDS}")
    rows: list[list[float | None]] = [[0.0 if run.reward is not None else None for run in group] for group in groups]
    for name, weight in rewards.items():
        parts = [[_read_part(run, name) for run in group] for group in groups]
        normalized = map_scored(parts, lambda values: standardize(values, epsilon=epsilon))
        for row, added in zip(rows, normalized, strict=True):
            row[:] = [
                None if total is None else total + weight * (value or 0.0)
                for total, value in zip(row, added, strict=True)
            ]
    rows = [[None] * len(row) if are_equal([value for value in row if value is not None]) else row for row in rows]
    return normalize_over_batch(rows, groups, epsilon=epsilon)


NEEDED_REWARDS = (
    "algorithm.advantage_args.rewards: the metrics of the judge that are rewards, with their weights, such as "
    "{accuracy: 1.0, format: 0.5}"
)


def _check_weights(rewards: Mapping[str, float] | None) -> None:
    if rewards is not None and (not rewards or not all(math.isfinite(w) and w != 0 for w in rewards.values())):
        raise ConfigError(f"rewards={rewards} of 'gdpo' must name metrics with finite weights other than 0")


def _read_part(run: RunOutcome, name: str) -> RunOutcome:
    """The rollout with the metric as its reward; None stays None."""
    if run.reward is None:
        return run
    if name not in run.metrics:
        raise ConfigError(
            f"advantage_args.rewards of 'gdpo' names {name!r}, but the judge scored a rollout without that metric (it "
            f"has {', '.join(run.metrics) or 'none'}): report it in JudgeOutput.metrics of every scored rollout, or "
            "name another metric"
        )
    return RunOutcome(reward=float(run.metrics[name]), num_turns=run.num_turns)
