"""The sampling distribution as a function of logits: bias, penalties and bans, temperature, top-k, top-p, min-p.

Engine and trainer share this definition: a sampled token's logprob is `log_softmax(truncate_logits(...))`. Each filter
is a threshold on the logit, so equal logits are kept or dropped together and the result does not depend on sort order.

Axes: N positions, V vocabulary, B biased tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tunesmith.model.forward.logit_adjustment import LogitAdjustment
from tunesmith.types import Distribution


def truncate_logits(
    logits_NV: Tensor,
    distribution: Distribution,
    *,
    keep_ids_N: Tensor | None = None,
    adjustment: LogitAdjustment | None = None,
) -> Tensor:
    """Logits (float32 or wider) with bias and temperature applied and dropped tokens at -inf; the input is unchanged.

    `adjustment`: penalties and bans of the positions, which follow the bias. `keep_ids_N`: one token per position that
    no filter drops. A sampled token had positive probability, even if rounding moves it past a threshold. Temperature 0
    applies neither temperature nor filters.
    """
    if distribution.logit_bias:
        ids, values = zip(*distribution.logit_bias, strict=True)
        bias_B = torch.tensor(values, dtype=logits_NV.dtype, device=logits_NV.device)
        logits_NV = logits_NV.index_add(
            1, torch.tensor(ids, device=logits_NV.device), bias_B.expand(len(logits_NV), -1)
        )
    if adjustment is not None:
        logits_NV = adjustment.apply(logits_NV)
    if distribution.temperature == 0:
        return logits_NV
    if distribution.temperature != 1:
        logits_NV = logits_NV / distribution.temperature
    if not has_truncation(distribution):
        return logits_NV
    is_dropped_NV = logits_NV < _compute_thresholds(logits_NV.detach(), distribution)
    if keep_ids_N is not None:
        is_dropped_NV.scatter_(1, keep_ids_N[:, None], False)
    return logits_NV.masked_fill(is_dropped_NV, -math.inf)


def has_truncation(distribution: Distribution) -> bool:
    """Whether any filter can drop a token."""
    is_filtered = distribution.top_k > 0 or distribution.top_p < 1 or distribution.min_p > 0
    return is_filtered and distribution.temperature > 0


def _compute_thresholds(logits_NV: Tensor, distribution: Distribution) -> Tensor:
    """Smallest logit [N, 1] that every filter keeps; top-p and min-p see the tokens left by top-k, renormalized."""
    vocab_size = logits_NV.shape[1]
    threshold_N1 = torch.full_like(logits_NV[:, :1], -math.inf)
    if 0 < distribution.top_k < vocab_size:
        threshold_N1 = logits_NV.topk(distribution.top_k, dim=1).values[:, -1:]
    if distribution.top_p < 1:
        kept_NV = logits_NV.masked_fill(logits_NV < threshold_N1, -math.inf)
        sorted_NV = kept_NV.sort(dim=1, descending=True).values
        probs_NV = sorted_NV.softmax(dim=1)
        mass_before_NV = probs_NV.cumsum(dim=1) - probs_NV
        num_kept_N1 = (mass_before_NV < distribution.top_p).sum(dim=1, keepdim=True).clamp(min=1)
        threshold_N1 = torch.maximum(threshold_N1, sorted_NV.gather(1, num_kept_N1 - 1))
    if distribution.min_p > 0:
        threshold_N1 = torch.maximum(threshold_N1, logits_NV.amax(dim=1, keepdim=True) + math.log(distribution.min_p))
    return threshold_N1
