"""Advantages that do not look at the other runs of the group: rewards as they are, or against a greedy run."""

from __future__ import annotations

from collections.abc import Sequence

from tunesmith.algorithms.advantages.group import Advantages, RunOutcome
from tunesmith.types import RunAdvantage


def keep_rewards(groups: Sequence[Sequence[RunOutcome]]) -> Advantages:
    """The rewards themselves, of which functions of all tokens of an update make advantages."""
    return [[run.reward for run in group] for group in groups]


def compute_remax_advantages(groups: Sequence[Sequence[RunOutcome]]) -> Advantages:
    """R - R_greedy, with the reward of one run at temperature 0 as the baseline (Li et al., 2024, ReMax).

    It does not depend on what was sampled, so the gradient stays unbiased, in a group of one too. A group whose greedy
    run failed, or whose runs all did exactly as well as it, teaches nothing.
    """
    return [_subtract_baseline(group) for group in groups]


def _subtract_baseline(group: Sequence[RunOutcome]) -> list[RunAdvantage]:
    row: list[RunAdvantage] = [
        None if run.reward is None or run.baseline_reward is None else run.reward - run.baseline_reward for run in group
    ]
    return row if any(row) else [None] * len(group)
