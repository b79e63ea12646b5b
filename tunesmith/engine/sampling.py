"""From logits to one token a row and its logprob, each row under its own distribution.

A row's draw is one uniform number made by hashing its seed and position, put through the inverse of the cumulative
distribution: what else is in the batch cannot change it. The logprob is that of the truncated, renormalised
distribution the token was drawn from. Rows whose logits are not finite come back marked, with no meaning. The
distribution itself is defined in `tunesmith.model.distribution`; rows of many distributions are handled here at once.

Axes: N rows, V vocabulary, M likeliest tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tunesmith.types import Distribution

NUM_CANDIDATES = 256
"""Top-p first looks among so many likeliest tokens, and sorts the whole vocabulary only where these hold too little."""


@dataclass(frozen=True, slots=True)
class Draws:
    """One token a row."""

    token_ids: list[int]
    logprobs: list[float]
    is_finite: list[bool]


def sample_tokens(
    logits_NV: Tensor, distributions: Sequence[Distribution], seeds: Sequence[int], positions: Sequence[int]
) -> Draws:
    """Draw one token a row; `logits_NV` is float32 and is overwritten."""
    _add_bias(logits_NV, distributions)
    temperatures = [distribution.temperature for distribution in distributions]
    if any(temperature not in (0.0, 1.0) for temperature in temperatures):
        divisors = [temperature or 1.0 for temperature in temperatures]
        logits_NV.div_(torch.tensor(divisors, device=logits_NV.device)[:, None])
    _truncate_rows(logits_NV, distributions)
    highest_N, greedy_ids_N = logits_NV.max(dim=1)
    weights_NV = logits_NV.sub_(highest_N[:, None]).exp_()
    cumulative_NV = weights_NV.cumsum(dim=1, dtype=torch.float64)
    totals_N = cumulative_NV[:, -1]
    if all(temperature == 0 for temperature in temperatures):
        ids_N = greedy_ids_N
    else:
        ids_N = _invert(cumulative_NV, compute_uniforms(seeds, positions, logits_NV.device))
        is_greedy_N = torch.tensor([temperature == 0 for temperature in temperatures], device=logits_NV.device)
        is_impossible_N = weights_NV.gather(1, ids_N[:, None])[:, 0] == 0  # a parallel scan may round downwards
        ids_N = torch.where(is_greedy_N | is_impossible_N, greedy_ids_N, ids_N)
    logprobs_N = (weights_NV.gather(1, ids_N[:, None])[:, 0].double() / totals_N).log()
    is_finite_N = totals_N.isfinite() & highest_N.isfinite()
    return Draws(ids_N.tolist(), logprobs_N.tolist(), is_finite_N.tolist())


def compute_uniforms(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> Tensor:
    """One float64 in [0, 1) per (seed, position): splitmix64 (Steele, Lea and Flood, 2014) over one, then the other."""
    seeds_N = torch.tensor([_wrap(seed) for seed in seeds], device=device)
    positions_N = torch.tensor(positions, device=device)
    return _shift_right(_mix(_mix(seeds_N) ^ positions_N), 11).double() * 2.0**-53


def _mix(state_N: Tensor) -> Tensor:
    """One round of splitmix64; int64 arithmetic wraps around as the unsigned one does."""
    state_N = state_N + _wrap(0x9E3779B97F4A7C15)
    state_N = (state_N ^ _shift_right(state_N, 30)) * _wrap(0xBF58476D1CE4E5B9)
    state_N = (state_N ^ _shift_right(state_N, 27)) * _wrap(0x94D049BB133111EB)
    return state_N ^ _shift_right(state_N, 31)


def _wrap(number: int) -> int:
    """The int64 of the same bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _shift_right(state_N: Tensor, num_bits: int) -> Tensor:
    """Shift zeros in from the left; `>>` alone would repeat the sign."""
    return (state_N >> num_bits) & ((1 << (64 - num_bits)) - 1)


def _invert(cumulative_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds the row's share of the total; its own weight is above zero."""
    totals_N = cumulative_NV[:, -1]
    targets_N = torch.minimum(uniforms_N * totals_N, torch.nextafter(totals_N, torch.zeros_like(totals_N)))
    ids_N1 = torch.searchsorted(cumulative_NV, targets_N[:, None], right=True)
    return ids_N1[:, 0].clamp_(max=cumulative_NV.shape[1] - 1)


def _add_bias(logits_NV: Tensor, distributions: Sequence[Distribution]) -> None:
    biases = [(row, *pair) for row, distribution in enumerate(distributions) for pair in distribution.logit_bias]
    if biases:
        rows, ids, values = (torch.tensor(column, device=logits_NV.device) for column in zip(*biases, strict=True))
        logits_NV.index_put_((rows, ids), values.to(logits_NV.dtype), accumulate=True)


def _truncate_rows(logits_NV: Tensor, distributions: Sequence[Distribution]) -> None:
    """Set dropped tokens to -inf in the rows that drop any; the logits are tempered."""
    rows = [row for row, distribution in enumerate(distributions) if _truncates(distribution)]
    if not rows:
        return
    index = torch.tensor(rows, device=logits_NV.device)
    chosen_NV = logits_NV if len(rows) == len(distributions) else logits_NV[index]
    thresholds_N1 = _compute_thresholds(chosen_NV, [distributions[row] for row in rows])
    chosen_NV.masked_fill_(chosen_NV < thresholds_N1, -math.inf)
    if chosen_NV is not logits_NV:
        logits_NV[index] = chosen_NV


def _truncates(distribution: Distribution) -> bool:
    is_filtered = distribution.top_k > 0 or distribution.top_p < 1 or distribution.min_p > 0
    return is_filtered and distribution.temperature > 0


def _compute_thresholds(logits_NV: Tensor, distributions: Sequence[Distribution]) -> Tensor:
    """The least logit [N, 1] each row keeps: top-k, then top-p and min-p of what is left, renormalised."""
    vocab_size = logits_NV.shape[1]
    top_ks = [d.top_k if 0 < d.top_k < vocab_size else 0 for d in distributions]
    has_top_p = any(d.top_p < 1 for d in distributions)
    num_candidates = min(vocab_size, max([1, NUM_CANDIDATES * has_top_p, *top_ks]))
    candidates_NM = logits_NV.topk(num_candidates, dim=1).values
    device = logits_NV.device
    thresholds_N1 = torch.full_like(candidates_NM[:, :1], -math.inf)
    if any(top_ks):
        ranks_N1 = torch.tensor([max(k, 1) - 1 for k in top_ks], device=device)[:, None]
        has_top_k_N1 = torch.tensor([k > 0 for k in top_ks], device=device)[:, None]
        thresholds_N1 = torch.where(has_top_k_N1, candidates_NM.gather(1, ranks_N1), thresholds_N1)
    if has_top_p:
        top_p_N1 = torch.tensor([d.top_p for d in distributions], device=device)[:, None]
        nucleus_N1 = _compute_nucleus(logits_NV, candidates_NM, thresholds_N1, top_p_N1)
        thresholds_N1 = torch.maximum(thresholds_N1, nucleus_N1)
    floors = [math.log(d.min_p) if d.min_p > 0 else -math.inf for d in distributions]
    return torch.maximum(thresholds_N1, candidates_NM[:, :1] + torch.tensor(floors, device=device)[:, None])


def _compute_nucleus(logits_NV: Tensor, candidates_NM: Tensor, thresholds_N1: Tensor, top_p_N1: Tensor) -> Tensor:
    """The least logit [N, 1] of the fewest likeliest tokens that hold `top_p` of the mass above the threshold."""
    total_N1 = logits_NV.masked_fill(logits_NV < thresholds_N1, -math.inf).logsumexp(dim=1, keepdim=True)
    probs_NM = (candidates_NM.masked_fill(candidates_NM < thresholds_N1, -math.inf) - total_N1).exp()
    cumulative_NM = probs_NM.cumsum(dim=1)
    num_candidates, vocab_size = candidates_NM.shape[1], logits_NV.shape[1]
    if num_candidates < vocab_size and bool((cumulative_NM[:, -1:] < top_p_N1).logical_and(top_p_N1 < 1).any()):
        sorted_NV = logits_NV.sort(dim=1, descending=True).values
        return _compute_nucleus(logits_NV, sorted_NV, thresholds_N1, top_p_N1)
    num_kept_N1 = (cumulative_NM - probs_NM < top_p_N1).sum(dim=1, keepdim=True).clamp_(1, num_candidates)
    return torch.where(top_p_N1 < 1, candidates_NM.gather(1, num_kept_N1 - 1), -math.inf)
