"""Advantages independent of the other rollouts of the group: the reward, or minus that of a greedy rollout."""

from __future__ import annotations

from collections.abc import Sequence

from tunesmith.algorithms.advantages.group import Advantages, RunOutcome
from tunesmith.types import RunAdvantage, are_equal


def keep_rewards(groups: Sequence[Sequence[RunOutcome]]) -> Advantages:
    """The raw rewards, for algorithms whose `compute_terms` computes the advantages."""
    return [[run.reward for run in group] for group in groups]


def compute_remax_advantages(groups: Sequence[Sequence[RunOutcome]]) -> Advantages:
    """R - R_greedy, with the reward of one rollout at temperature 0 as the baseline (Li et al., 2024, ReMax).

    The baseline does not depend on the sampled rollouts, so the gradient is unbiased, also in a group of one. A group
    whose greedy rollout failed, or whose rewards all equal the baseline, is dropped.
    """
    return [_subtract_baseline(group) for group in groups]


def _subtract_baseline(group: Sequence[RunOutcome]) -> list[RunAdvantage]:
    compared = [reward for run in group for reward in (run.reward, run.baseline_reward) if reward is not None]
    if are_equal(compared):
        return [None] * len(group)
    return [
        None if run.reward is None or run.baseline_reward is None else run.reward - run.baseline_reward for run in group
    ]
