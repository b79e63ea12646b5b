"""Whether a rollout branches after a tool result, and how a group's rollouts are divided; pure functions.

An entropy here is the sum of the token entropies of a window divided by the log of the vocabulary size, as in ARPO
(Dong et al., 2025, section 3.1): 0 for a deterministic window, the window's length for a uniform one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from tunesmith.config.rollout import BranchingSection


def compute_window_entropy(entropies: Sequence[float], *, window: int, vocab_size: int) -> float:
    """Entropy of the first `window` tokens of a turn, given in nats per token.

    A shorter turn counts with its mean for the missing tokens, so that short turns do not look certain.
    """
    return window * fmean(entropies[:window]) / math.log(vocab_size)


def compute_branch_probability(section: BranchingSection, *, change: float, num_consecutive: int) -> float:
    """Probability of each further continuation at a branch point.

    `change` is the entropy after the tool result minus that at the start of the rollout (ARPO, eq. 3);
    `num_consecutive` counts the branch points with a branch directly before it on its path (AEPO).
    """
    probability = min(max(section.base_probability + section.entropy_weight * change, 0.0), 1.0)
    return probability * max(1.0 - section.consecutive_penalty * num_consecutive, 0.0)


def split_evenly(total: int, num_parts: int) -> list[int]:
    """`total` in parts that differ by at most 1, larger ones first."""
    size, num_larger = divmod(total, num_parts)
    return [size + (index < num_larger) for index in range(num_parts)]


def divide_budget(budget: int, num_branches: int) -> list[int]:
    """How many rollouts each of `num_branches` new branches receives, itself included; the parent keeps the rest.

    What is left after one rollout for each branch is split evenly between the branches and the parent.
    """
    assert 0 <= num_branches <= budget
    return [1 + share for share in split_evenly(budget - num_branches, num_branches + 1)[:num_branches]]


def choose_num_initial(
    group_size: int, *, slope: float, entropy_at_start: float, tool_entropies: Sequence[float]
) -> int:
    """AEPO's number of initial rollouts (Dong et al., 2025, eq. 6), at least 1."""
    gap = slope * (entropy_at_start - fmean(tool_entropies))
    share = 1 / (1 + math.exp(-gap)) if gap > -700 else 0.0
    return min(max(round(group_size * share), 1), group_size)
