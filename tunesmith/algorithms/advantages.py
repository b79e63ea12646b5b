"""From the rewards of a group to one advantage per run.

A run's advantage says how much better it did than the other runs of its task. Values in, values out. A run without a
reward is left out of every statistic and gets None. A group whose scored runs all did alike teaches nothing: its runs
get None, and the caller drops and counts them. A group with one scored run has nothing to compare with: advantage 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat

Advantages = list[list[float | None]]
"""One number per run of each group; None does not train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """What an advantage needs to know of one run."""

    reward: float | None
    num_steps: int
    """Model calls that the run made."""


def compute_grpo_advantages(
    groups: Sequence[Sequence[RunOutcome]],
    *,
    epsilon: PositiveFloat = 1e-6,
    std_cal_level: Literal["group", "batch"] = "group",
    std_threshold: NonNegativeFloat = 0.0,
) -> Advantages:
    """(R - mean) / (std + epsilon), each model call counted as one observation (Shao et al., 2024, section 4.1).

    A run of many calls therefore weighs more in the mean and the deviation; `compute_multi_step_grpo_advantages`
    counts runs. The deviation has one degree of freedom taken off; `std_cal_level="batch"` takes it over all groups.
    A group whose own deviation is at most `std_threshold` is dropped.
    """
    weights = [[run.num_steps for run in group] for group in groups]
    return _compute_advantages(groups, weights, epsilon, std_cal_level, std_threshold)


def compute_multi_step_grpo_advantages(
    groups: Sequence[Sequence[RunOutcome]],
    *,
    epsilon: PositiveFloat = 1e-6,
    enable_step_norm: bool = False,
    std_cal_level: Literal["group", "batch"] = "group",
    std_threshold: NonNegativeFloat = 0.0,
) -> Advantages:
    """As GRPO with each run counted once, however many model calls it made.

    `enable_step_norm` divides a run's advantage by its number of model calls, so that with token weights a run does not
    count for more because it called more often.
    """
    weights = [[1] * len(group) for group in groups]
    advantages = _compute_advantages(groups, weights, epsilon, std_cal_level, std_threshold)
    if not enable_step_norm:
        return advantages
    return [
        [None if value is None else value / max(run.num_steps, 1) for run, value in zip(group, row, strict=True)]
        for group, row in zip(groups, advantages, strict=True)
    ]


def _compute_advantages(
    groups: Sequence[Sequence[RunOutcome]],
    weights: Sequence[Sequence[int]],
    epsilon: float,
    std_cal_level: str,
    std_threshold: float,
) -> Advantages:
    observed = [_select_observed(group, row) for group, row in zip(groups, weights, strict=True)]
    batch_std = _compute_mean_and_std([pair for pairs in observed for pair in pairs])[1]
    advantages: Advantages = []
    for group, pairs in zip(groups, observed, strict=True):
        mean, std = _compute_mean_and_std(pairs)
        if len(pairs) == 1:
            advantages.append([None if run.reward is None else 0.0 for run in group])
        elif _has_no_variance(pairs) or std <= std_threshold:
            advantages.append([None] * len(group))
        else:
            scale = (batch_std if std_cal_level == "batch" else std) + epsilon
            advantages.append([None if run.reward is None else (run.reward - mean) / scale for run in group])
    return advantages


def _select_observed(group: Sequence[RunOutcome], weights: Sequence[int]) -> list[tuple[float, int]]:
    """Reward and weight of the runs that count."""
    return [(r.reward, w) for r, w in zip(group, weights, strict=True) if r.reward is not None and w > 0]


def _has_no_variance(pairs: Sequence[tuple[float, int]]) -> bool:
    """Compared, not computed: the deviation of equal rewards may round to something above 0."""
    return len({reward for reward, _ in pairs}) <= 1


def _compute_mean_and_std(pairs: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Weighted mean and sample standard deviation (one degree of freedom taken off); 0 where undefined."""
    total = sum(weight for _, weight in pairs)
    if total == 0:
        return 0.0, 0.0
    mean = math.fsum(weight * reward for reward, weight in pairs) / total
    if total == 1:
        return mean, 0.0
    return mean, math.sqrt(math.fsum(weight * (reward - mean) ** 2 for reward, weight in pairs) / (total - 1))
