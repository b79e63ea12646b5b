"""Advantages that maximize pass@k, the probability that one of k rollouts of a task succeeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import PositiveInt

from tunesmith.algorithms.advantages.group import Advantages, RunOutcome, map_groups

DEFAULT_K = 4


def compute_pass_at_k_advantages(
    groups: Sequence[Sequence[RunOutcome]], *, k: PositiveInt = DEFAULT_K, min_reward: float = 1.0
) -> Advantages:
    """The mean advantage of a rollout over all subsets of k rollouts that contain it.

    Chen et al. (2025), "Pass@k training for adaptively balancing exploration and exploitation". The reward of a subset
    is 1 if one of its rollouts succeeded, with a reward of at least `min_reward`; its advantage is
    (reward - P) / sqrt(P (1 - P)), where P is the mean over all subsets. In closed form (the paper's analytical
    derivation), with n scored rollouts of which f failed, P = 1 - C(f, k) / C(n, k), a success gets (1 - P) / std and a
    failure (1 - P - C(f - 1, k - 1) / C(n - 1, k - 1)) / std. A group is dropped if all subsets have the same reward:
    no success, fewer than k failures, or no more than k scored rollouts. With k = 1 this is GRPO with the population
    std.
    """

    def average_over_subsets(rewards: list[float]) -> list[float] | None:
        n, f = len(rewards), sum(reward < min_reward for reward in rewards)
        if f in (0, n) or not k <= f:
            return None
        mean = 1 - math.comb(f, k) / math.comb(n, k)
        std = math.sqrt(mean * (1 - mean))
        failed = (1 - mean - math.comb(f - 1, k - 1) / math.comb(n - 1, k - 1)) / std
        return [failed if reward < min_reward else (1 - mean) / std for reward in rewards]

    return map_groups(groups, average_over_subsets)
