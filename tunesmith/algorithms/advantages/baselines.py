"""From the rewards of a group to advantages: rewards minus a baseline, and choices of which runs to learn from.

As in `advantages.py`, a run without a reward gets None and leaves no trace, and None does not train.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Literal

from pydantic import PositiveFloat

from tunesmith.algorithms.advantages.group import Advantages, RunOutcome, map_groups
from tunesmith.errors import ConfigError


def compute_reinforce_advantages(groups: Sequence[Sequence[RunOutcome]], *, baseline: float = 0.0) -> Advantages:
    """R - baseline, a constant (Williams, 1992, REINFORCE); a group of one trains too."""
    return [[None if run.reward is None else run.reward - baseline for run in group] for group in groups]


def compute_rloo_advantages(groups: Sequence[Sequence[RunOutcome]]) -> Advantages:
    """R minus the mean of the others, which is n / (n - 1) (R - mean): leave-one-out (Ahmadian et al., 2024, eq. 5).

    The baseline does not depend on the run itself, so that the policy gradient is unbiased (Kool et al., 2019).
    """

    def leave_one_out(rewards: list[float]) -> list[float] | None:
        if len(set(rewards)) == 1:
            return None
        total, num_others = math.fsum(rewards), len(rewards) - 1
        return [reward - (total - reward) / num_others for reward in rewards]

    return map_groups(groups, leave_one_out)


def compute_opmd_advantages(
    groups: Sequence[Sequence[RunOutcome]],
    *,
    baseline: Literal["mean", "logavgexp"] = "mean",
    tau: PositiveFloat = 1.0,
) -> Advantages:
    """R - b, b the group's mean or tau log mean exp(R / tau): online policy mirror descent.

    logavgexp is the exact normaliser of the policy that mirror descent asks for, estimated on the group, and mean its
    limit for large tau, whatever policy sampled (Yao et al., 2025, "Group-relative REINFORCE is secretly an off-policy
    algorithm", section 2; Kimi Team, 2025, section 2.3). `tau` is for logavgexp alone.
    """
    if baseline == "mean" and tau != 1.0:
        raise ConfigError(f"tau={tau:g} has no effect on baseline='mean': choose baseline='logavgexp', or leave it out")

    def subtract(rewards: list[float]) -> list[float] | None:
        if len(set(rewards)) == 1:
            return None
        if baseline == "mean":
            level = math.fsum(rewards) / len(rewards)
        else:
            top = max(rewards)
            level = top + tau * math.log(math.fsum(math.exp((r - top) / tau) for r in rewards) / len(rewards))
        return [reward - level for reward in rewards]

    return map_groups(groups, subtract)


def compute_asymre_advantages(groups: Sequence[Sequence[RunOutcome]], *, baseline_shift: float = -0.1) -> Advantages:
    """R - (mean + baseline_shift): asymmetric REINFORCE (Arnal et al., 2025, section 4).

    A negative shift leans towards what succeeded, which keeps REINFORCE stable on data of other policies. The shift
    alone remains where all runs did alike, and in a group of one: such data is imitated a little.
    """
    advantages: Advantages = []
    for group in groups:
        rewards = [run.reward for run in group if run.reward is not None]
        level = math.fsum(rewards) / max(len(rewards), 1) + baseline_shift
        advantages.append([None if run.reward is None else run.reward - level for run in group])
    return advantages


def compute_rec_advantages(
    groups: Sequence[Sequence[RunOutcome]],
    *,
    std_normalize: bool = False,
    drop: Literal["none", "balance"] = "none",
    epsilon: PositiveFloat = 1e-6,
) -> Advantages:
    """R - mean of what is kept, over the deviation (of the population) if asked (Yao et al., 2025, REC and RED).

    `drop="balance"` is RED-Drop: where more runs are below the mean than not, the surplus of those below is left out,
    drawn by a generator that the group's own logprobs seed, so that a run repeated or resumed draws the same.
    """
    advantages: Advantages = []
    for group in groups:
        kept = _balance(group) if drop == "balance" else [run.reward is not None for run in group]
        kept_groups = [[run for run, is_kept in zip(group, kept, strict=True) if is_kept]]
        found = iter(map_groups(kept_groups, lambda rewards: _normalize(rewards, std_normalize, epsilon))[0])
        advantages.append([next(found) if is_kept else None for is_kept in kept])
    return advantages


def compute_raft_advantages(groups: Sequence[Sequence[RunOutcome]], *, min_reward: float | None = None) -> Advantages:
    """1 for the runs that won, None for all others: reward-ranked fine-tuning (Dong et al., 2023, RAFT, algorithm 1).

    A run wins if no run of its group has a higher reward and its own is above 0, or at least `min_reward` where that is
    given. A group of one may win.
    """
    advantages: Advantages = []
    for group in groups:
        best = max((run.reward for run in group if run.reward is not None), default=0.0)
        has_winner = best > 0 if min_reward is None else best >= min_reward
        advantages.append([1.0 if has_winner and run.reward == best else None for run in group])
    return advantages


def _balance(group: Sequence[RunOutcome]) -> list[bool]:
    """Which runs to keep, so that no more are below the mean than not."""
    rewards = [run.reward for run in group if run.reward is not None]
    mean = math.fsum(rewards) / max(len(rewards), 1)
    below = [index for index, run in enumerate(group) if run.reward is not None and run.reward < mean]
    num_surplus = max(2 * len(below) - len(rewards), 0)
    rng = random.Random(repr([run.turn_logprobs for run in group]))
    dropped = set(rng.sample(below, num_surplus))
    return [run.reward is not None and index not in dropped for index, run in enumerate(group)]


def _normalize(rewards: list[float], std_normalize: bool, epsilon: float) -> list[float] | None:
    if len(set(rewards)) == 1:
        return None
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / (std + epsilon if std_normalize else 1.0) for reward in rewards]
