"""Policy gradients masked where policy and sampling policy diverge (Qi et al., 2026, DPPO).

"Rethinking the trust region in LLM reinforcement learning". PPO clips by the ratio r of the sampled token, which is
large for improbable tokens even if the distribution hardly changes. DPPO masks by a divergence D of the distributions
of policy and sampling policy: a token with A > 0 and r > 1, or A < 0 and r < 1, has no gradient where D is above its
limit (eq. 12). The *binary* approximation compares the probabilities of the sampled token and of all others together;
it is a lower bound of the divergence over the vocabulary.

Axes: N sampled tokens. p and q are the probabilities of the token under policy and old policy, d = log r.
"""

from __future__ import annotations

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from tunesmith.algorithms.losses.clipped import Share, clamp_log_ratio
from tunesmith.algorithms.scores import TokenLosses, TokenScores


def compute_dppo_tv_losses(
    scores: TokenScores,
    *,
    delta_low: Share = 0.2,
    delta_high: Share = 0.2,
    ratio_cap: PositiveFloat | None = None,
    regularizer_coef: NonNegativeFloat = 0.0,
) -> TokenLosses:
    """-A r, masked where D = |p - q| is above its limit (eqs. 12, 13): `delta_high` for A > 0, `delta_low` for A < 0.

    `ratio_cap` truncates r as a weight (eq. 23); the paper's large runs use 5, verl 20. `regularizer_coef` adds coef
    d^2 at every token. prime-rl's default is this loss with coef 1e-3 and token-mean. Metric: `clip_frac`, the share of
    masked tokens.
    """
    divergence_N = (scores.logprobs_N.detach().exp() - scores.old_logprobs_N.exp()).abs()
    return _mask_losses(scores, divergence_N, delta_low, delta_high, ratio_cap, regularizer_coef)


def compute_dppo_kl_losses(
    scores: TokenScores,
    *,
    delta_low: NonNegativeFloat = 0.05,
    delta_high: NonNegativeFloat = 0.05,
    ratio_cap: PositiveFloat | None = None,
    regularizer_coef: NonNegativeFloat = 0.0,
) -> TokenLosses:
    """As `compute_dppo_tv_losses` with D = q log(q / p) + (1 - q) log((1 - q) / (1 - p)) (eq. 14)."""
    logprobs_N, old_logprobs_N = scores.logprobs_N.detach(), scores.old_logprobs_N
    rest_N, old_rest_N = _compute_complement(logprobs_N), _compute_complement(old_logprobs_N)
    divergence_N = old_logprobs_N.exp() * (old_logprobs_N - logprobs_N) + old_rest_N * (old_rest_N / rest_N).log()
    return _mask_losses(scores, divergence_N, delta_low, delta_high, ratio_cap, regularizer_coef)


def _compute_complement(logprobs_N: Tensor) -> Tensor:
    """1 - p, accurate for p near 1 and positive."""
    return (-torch.expm1(logprobs_N)).clamp(min=torch.finfo(logprobs_N.dtype).eps ** 2)


def _mask_losses(
    scores: TokenScores,
    divergence_N: Tensor,
    delta_low: float,
    delta_high: float,
    ratio_cap: float | None,
    regularizer_coef: float,
) -> TokenLosses:
    log_ratio_N = clamp_log_ratio(scores.logprobs_N - scores.old_logprobs_N)
    moved_N = log_ratio_N.detach()
    is_masked_N = (scores.advantages_N > 0) & (moved_N > 0) & (divergence_N > delta_high)
    is_masked_N |= (scores.advantages_N < 0) & (moved_N < 0) & (divergence_N > delta_low)
    ratio_N = moved_N.exp() if ratio_cap is None else moved_N.exp().clamp(max=ratio_cap)
    weights_N = ratio_N.masked_fill(is_masked_N, 0.0)
    losses_N = -scores.advantages_N * weights_N * (scores.logprobs_N - scores.logprobs_N.detach()).exp()
    if regularizer_coef > 0:
        losses_N = losses_N + regularizer_coef * log_ratio_N.square()
    return TokenLosses(losses_N=losses_N, metrics={"clip_frac": is_masked_N.to(log_ratio_N.dtype)})
