"""An advantage function and a loss function of your own, named in config.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from tunesmith import RunOutcome, TokenLosses, TokenScores


def advantages(groups: Sequence[Sequence[RunOutcome]], *, scale: float = 1.0) -> list[list[float | None]]:
    """Reward minus the median of the group, which a single lucky rollout does not move."""
    rows: list[list[float | None]] = []
    for group in groups:
        center = median(run.reward for run in group)
        values = [scale * (run.reward - center) for run in group]
        rows.append(values if any(values) else [None] * len(group))
    return rows


def loss(scores: TokenScores, *, clip_low: float = 0.2, clip_high: float = 0.28) -> TokenLosses:
    """PPO's clip, with gradients of clipped tokens scaled down instead of dropped."""
    ratio_N = (scores.logprobs_N - scores.old_logprobs_N).clamp(-20, 20).exp()
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    plain_N, bounded_N = -scores.advantages_N * ratio_N, -scores.advantages_N * clipped_N
    is_clipped_N = bounded_N > plain_N
    losses_N = torch.where(is_clipped_N, bounded_N + 0.1 * (plain_N - plain_N.detach()), plain_N)
    return TokenLosses(losses_N=losses_N, metrics={"own_clip_frac": is_clipped_N.to(losses_N.dtype)})
