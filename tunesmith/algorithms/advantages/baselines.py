"""Rewards, rewards minus a baseline, and selection of the rollouts to train on.

As in `group.py`, a rollout without a reward gets None and is excluded from all statistics; None is not trained.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import PositiveFloat

from tunesmith.algorithms.advantages.group import Advantages, RunOutcome, map_groups, standardize, subtract_mean
from tunesmith.errors import ConfigError
from tunesmith.types import RunAdvantage, are_equal, is_above, is_at_least


def keep_rewards(groups: Sequence[Sequence[RunOutcome]]) -> Advantages:
    """The raw rewards, for algorithms whose `compute_terms` computes the advantages."""
    return [[run.reward for run in group] for group in groups]


def compute_reinforce_advantages(groups: Sequence[Sequence[RunOutcome]], *, baseline: float = 0.0) -> Advantages:
    """R - baseline, a constant (Williams, 1992, REINFORCE); also defined for a group of one."""
    return [[None if run.reward is None else run.reward - baseline for run in group] for group in groups]


def compute_remax_advantages(groups: Sequence[Sequence[RunOutcome]]) -> Advantages:
    """R - R_greedy, with the reward of one rollout at temperature 0 as the baseline (Li et al., 2024, ReMax).

    The baseline does not depend on the sampled rollouts, so the gradient is unbiased, also in a group of one. A group
    whose greedy rollout failed, or whose rewards all equal the baseline, is dropped.
    """
    return [_subtract_baseline(group) for group in groups]


def compute_rloo_advantages(groups: Sequence[Sequence[RunOutcome]]) -> Advantages:
    """REINFORCE leave-one-out: R minus the mean of the other rollouts, n / (n - 1) (R - mean).

    Ahmadian et al. (2024), eq. 5. The baseline does not depend on the rollout itself, so the policy gradient is
    unbiased (Kool et al., 2019).
    """

    def leave_one_out(rewards: list[float]) -> list[float]:
        total, num_others = math.fsum(rewards), len(rewards) - 1
        return [reward - (total - reward) / num_others for reward in rewards]

    return map_groups(groups, leave_one_out)


def compute_opo_advantages(groups: Sequence[Sequence[RunOutcome]]) -> Advantages:
    """R - b with b the mean reward of the group weighted by length, sum(l R) / sum(l) (Hao et al., 2025, OPO).

    This baseline minimizes the variance of the gradient of the summed logprobs if its squared norm is proportional to
    the length l, the number of sampled tokens over all turns. Rollouts without a token have no weight.
    """
    advantages: list[list[RunAdvantage]] = []
    for group in groups:
        lengths = [sum(map(len, run.turn_logprobs)) for run in group]
        scored = [(run.reward, n) for run, n in zip(group, lengths, strict=True) if run.reward is not None and n > 0]
        if are_equal([reward for reward, _ in scored]):
            advantages.append([None] * len(group))
            continue
        baseline = math.fsum(reward * n for reward, n in scored) / sum(n for _, n in scored)
        advantages.append([None if run.reward is None else run.reward - baseline for run in group])
    return advantages


def compute_opmd_advantages(
    groups: Sequence[Sequence[RunOutcome]], *, baseline: Literal["mean", "logavgexp"] = "mean", tau: PositiveFloat = 1.0
) -> Advantages:
    """Online policy mirror descent: R - b, with b the group's mean or tau log mean exp(R / tau).

    logavgexp is the log-normalizer of the optimal policy of the mirror descent problem, estimated on the group; mean is
    its limit for large tau. Both hold whichever policy sampled (Yao et al., 2025, "Group-relative REINFORCE is secretly
    an off-policy algorithm", section 2; Kimi Team, 2025, section 2.3). `tau` is read with baseline="logavgexp" only.
    """
    if baseline == "mean" and tau != 1.0:
        raise ConfigError(f"tau={tau:g} has no effect with baseline='mean': set baseline='logavgexp', or leave tau out")

    def subtract(rewards: list[float]) -> list[float]:
        if baseline == "mean":
            return subtract_mean(rewards)
        top = max(rewards)
        value = top + tau * math.log(math.fsum(math.exp((r - top) / tau) for r in rewards) / len(rewards))
        return [reward - value for reward in rewards]

    return map_groups(groups, subtract)


def compute_asymre_advantages(groups: Sequence[Sequence[RunOutcome]], *, baseline_shift: float = -0.1) -> Advantages:
    """Asymmetric REINFORCE: R - (mean + baseline_shift) (Arnal et al., 2025, section 4).

    A negative shift gives more weight to successes than to failures, which keeps REINFORCE stable on off-policy data.
    With equal rewards, or in a group of one, the advantage is -baseline_shift: such rollouts are imitated weakly.
    """
    advantages: list[list[RunAdvantage]] = []
    for group in groups:
        rewards = [run.reward for run in group if run.reward is not None]
        baseline = math.fsum(rewards) / max(len(rewards), 1) + baseline_shift
        advantages.append([None if run.reward is None else run.reward - baseline for run in group])
    return advantages


def compute_rec_advantages(
    groups: Sequence[Sequence[RunOutcome]],
    *,
    std_normalize: bool = False,
    drop: Literal["none", "balance"] = "none",
    epsilon: PositiveFloat = 1e-6,
) -> Advantages:
    """REC and RED (Yao et al., 2025): R - mean over kept rollouts, divided by their population std if `std_normalize`.

    `drop="balance"` is RED-Drop: where more rollouts are below the mean than not, the surplus of those below is dropped
    at random. The random generator is seeded with the group's logprobs, so a repeated or resumed run drops the same
    ones.
    """
    if not std_normalize and epsilon != 1e-6:
        raise ConfigError(
            f"epsilon={epsilon:g} has no effect without std_normalize: set it to true, or leave epsilon out"
        )

    def normalize(rewards: list[float]) -> list[float]:
        return standardize(rewards, epsilon=epsilon, ddof=0) if std_normalize else subtract_mean(rewards)

    if drop == "balance":
        groups = [_drop_surplus(group) for group in groups]
    return map_groups(groups, normalize)


def compute_raft_advantages(groups: Sequence[Sequence[RunOutcome]], *, min_reward: float | None = None) -> Advantages:
    """Reward-ranked fine-tuning: 1 for selected rollouts, None for all others (Dong et al., 2023, RAFT, algorithm 1).

    A rollout is selected if no rollout of its group has a higher reward and its own is above 0, or at least
    `min_reward` if set. In a group of one the rollout itself is the best one.
    """
    advantages: list[list[RunAdvantage]] = []
    for group in groups:
        best = max((run.reward for run in group if run.reward is not None), default=0.0)
        is_selected = is_above(best, 0.0) if min_reward is None else is_at_least(best, min_reward)
        advantages.append(
            [
                1.0 if is_selected and run.reward is not None and not is_above(best, run.reward) else None
                for run in group
            ]
        )
    return advantages


def _drop_surplus(group: Sequence[RunOutcome]) -> list[RunOutcome]:
    """The group, without the rewards of as many rollouts below its mean as make them more than half."""
    rewards = [run.reward for run in group if run.reward is not None]
    mean = math.fsum(rewards) / max(len(rewards), 1)
    below = [index for index, run in enumerate(group) if run.reward is not None and is_above(mean, run.reward)]
    num_surplus = max(2 * len(below) - len(rewards), 0)
    rng = random.Random(repr([run.turn_logprobs for run in group]))
    dropped = set(rng.sample(below, num_surplus))
    return [replace(run, reward=None) if index in dropped else run for index, run in enumerate(group)]


def _subtract_baseline(group: Sequence[RunOutcome]) -> list[RunAdvantage]:
    compared = [reward for run in group for reward in (run.reward, run.baseline_reward) if reward is not None]
    if are_equal(compared):
        return [None] * len(group)
    return [
        None if run.reward is None or run.baseline_reward is None else run.reward - run.baseline_reward for run in group
    ]
