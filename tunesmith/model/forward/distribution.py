"""The distribution tokens are sampled from, made of logits: bias, temperature, top-k, top-p, min-p.

The definition that sampler and trainer share: a sampled token's logprob is `log_softmax(truncate_logits(...))`. Each
filter keeps tokens by a threshold on the logit, so equal logits share their fate and no order of sorting matters.

Axes: N positions, V vocabulary, B biased tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tunesmith.types import Distribution


def truncate_logits(logits_NV: Tensor, distribution: Distribution, *, keep_ids_N: Tensor | None = None) -> Tensor:
    """Biased and tempered logits (float32 or wider) in which dropped tokens are -inf; the input is not changed.

    `keep_ids_N` names one token per position that is kept whatever the filters say: a token that was sampled had
    probability, even where rounding moves it over a threshold. Temperature 0 gives the logits untempered and whole.
    """
    if distribution.logit_bias:
        ids, values = zip(*distribution.logit_bias, strict=True)
        bias_B = torch.tensor(values, dtype=logits_NV.dtype, device=logits_NV.device)
        logits_NV = logits_NV.index_add(
            1, torch.tensor(ids, device=logits_NV.device), bias_B.expand(len(logits_NV), -1)
        )
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
    """The least logit [N, 1] that every filter keeps; top-p and min-p measure what top-k left, renormalised."""
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
