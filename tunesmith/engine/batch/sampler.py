"""From logits to one token a row and its logprob, each row under its own distribution.

A row's draw is one uniform number made by hashing its seed and position, put through the inverse of the cumulative
distribution: what else is in the batch cannot change it. The logprob is that of the truncated, renormalised
distribution the token was drawn from. Rows whose logits are not finite come back marked, with no meaning. The
distribution itself is defined in `model.forward.distribution`; rows of many distributions are handled here at once.

Axes: N rows, V vocabulary, M likeliest tokens, B tiles of the vocabulary, Z tokens of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunesmith.types import Distribution

NUM_CANDIDATES = 256
"""Top-p first looks among so many likeliest tokens, and sorts the whole vocabulary only where these hold too little."""

MAX_TILE_SIZE = 512
"""The cumulative distribution is scanned in tiles of at most so many tokens, then within one of them."""


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One token a row."""

    token_ids: list[int]
    logprobs: list[float]
    is_finite: list[bool]


def sample_tokens(
    logits_NV: Tensor, distributions: Sequence[Distribution], seeds: Sequence[int], positions: Sequence[int]
) -> SamplerOutput:
    """Draw one token a row; `logits_NV` is float32 and is overwritten."""
    _add_bias(logits_NV, distributions)
    temperatures = [distribution.temperature for distribution in distributions]
    if any(temperature not in (0.0, 1.0) for temperature in temperatures):
        divisors = [temperature or 1.0 for temperature in temperatures]
        logits_NV.div_(torch.tensor(divisors, device=logits_NV.device)[:, None])
    _truncate_rows(logits_NV, distributions)
    is_greedy = [temperature == 0 for temperature in temperatures]
    greedy_ids_N = logits_NV.argmax(dim=1) if any(is_greedy) else None
    highest_N = logits_NV.amax(dim=1)
    weights_NV = logits_NV.sub_(highest_N[:, None]).exp_()
    tile_sums_NB = _sum_tiles(weights_NV)
    totals_N = tile_sums_NB[:, -1]
    if greedy_ids_N is not None and all(is_greedy):
        ids_N = greedy_ids_N
    else:
        ids_N = _invert(weights_NV, tile_sums_NB, compute_uniforms(seeds, positions, logits_NV.device))
        if greedy_ids_N is not None:
            ids_N = torch.where(torch.tensor(is_greedy, device=logits_NV.device), greedy_ids_N, ids_N)
    logprobs_N = (weights_NV.gather(1, ids_N[:, None])[:, 0].double() / totals_N).log()
    is_finite_N = totals_N.isfinite() & highest_N.isfinite()
    return SamplerOutput(ids_N.tolist(), logprobs_N.tolist(), is_finite_N.tolist())


def compute_uniforms(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> Tensor:
    """One float64 in [0, 1) per (seed, position): splitmix64 (Steele, Lea and Flood, 2014) over one, then the other."""
    seeds_N = np.array([seed % (1 << 64) for seed in seeds], dtype=np.uint64)
    mixed_N = _mix(_mix(seeds_N) ^ np.array(positions, dtype=np.uint64))
    return torch.from_numpy((mixed_N >> np.uint64(11)) * 2.0**-53).to(device)


def _mix(state_N: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One round of splitmix64."""
    state_N = state_N + np.uint64(0x9E3779B97F4A7C15)
    state_N = (state_N ^ (state_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state_N = (state_N ^ (state_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state_N ^ (state_N >> np.uint64(31))


def wrap_int64(number: int) -> int:
    """The int64 of the same bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


@cache
def _choose_tile_size(vocab_size: int) -> int:
    """The largest divisor of the vocabulary size up to `MAX_TILE_SIZE`."""
    return max(size for size in range(1, MAX_TILE_SIZE + 1) if vocab_size % size == 0)


def _sum_tiles(weights_NV: Tensor) -> Tensor:
    """Cumulative weight [N, B] at the end of each tile of the vocabulary: far fewer numbers to scan than V."""
    num_rows, vocab_size = weights_NV.shape
    tiles = weights_NV.view(num_rows, -1, _choose_tile_size(vocab_size))
    return tiles.sum(dim=2, dtype=torch.float64).cumsum(dim=1)


def _invert(weights_NV: Tensor, tile_sums_NB: Tensor, uniforms_N: Tensor) -> Tensor:
    """The token at which the cumulative weight passes the row's share of the total; its own weight is above zero."""
    num_rows, size = len(weights_NV), _choose_tile_size(weights_NV.shape[1])
    tile_N1, rest_N1 = _find_passing(tile_sums_NB, uniforms_N[:, None] * tile_sums_NB[:, -1:])
    tile_NZ = weights_NV.view(num_rows, -1, size).gather(1, tile_N1[:, :, None].expand(-1, -1, size))[:, 0]
    inner_N1, _ = _find_passing(tile_NZ.cumsum(dim=1, dtype=torch.float64), rest_N1)
    is_possible_N1 = tile_NZ.gather(1, inner_N1) > 0  # a parallel scan may round its sums downwards
    inner_N1 = torch.where(is_possible_N1, inner_N1, tile_NZ.argmax(dim=1, keepdim=True))
    return (tile_N1 * size + inner_N1)[:, 0]


def _find_passing(cumulative_NB: Tensor, targets_N1: Tensor) -> tuple[Tensor, Tensor]:
    """The first entry [N, 1] above each target, and what the target exceeds the entry before it by."""
    totals_N1 = cumulative_NB[:, -1:]
    targets_N1 = torch.minimum(targets_N1, torch.nextafter(totals_N1, torch.zeros_like(totals_N1)))
    index_N1 = torch.searchsorted(cumulative_NB, targets_N1, right=True).clamp_(max=cumulative_NB.shape[1] - 1)
    before_N1 = cumulative_NB.gather(1, (index_N1 - 1).clamp(min=0)) * (index_N1 > 0)
    return index_N1, targets_N1 - before_N1


def _add_bias(logits_NV: Tensor, distributions: Sequence[Distribution]) -> None:
    biases = [(row, *pair) for row, distribution in enumerate(distributions) for pair in distribution.logit_bias]
    if biases:
        rows, ids, values = (torch.tensor(column, device=logits_NV.device) for column in zip(*biases, strict=True))
        logits_NV.index_put_((rows, ids), values.to(logits_NV.dtype), accumulate=True)


def _truncate_rows(logits_NV: Tensor, distributions: Sequence[Distribution]) -> None:
    """Set dropped tokens to -inf in the rows that drop any; the logits are tempered."""
    rows = [row for row, distribution in enumerate(distributions) if has_truncation(distribution)]
    if not rows:
        return
    index = torch.tensor(rows, device=logits_NV.device)
    chosen_NV = logits_NV if len(rows) == len(distributions) else logits_NV[index]
    thresholds_N1 = _compute_thresholds(chosen_NV, [distributions[row] for row in rows])
    chosen_NV.masked_fill_(chosen_NV < thresholds_N1, -math.inf)
    if chosen_NV is not logits_NV:
        logits_NV[index] = chosen_NV


def has_truncation(distribution: Distribution) -> bool:
    """Some tokens are dropped from the vocabulary before the draw."""
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
    num_kept_N1 = (cumulative_NM - probs_NM < top_p_N1).sum(dim=1, keepdim=True).clamp_(1, candidates_NM.shape[1])
    least_N1 = torch.where(top_p_N1 < 1, candidates_NM.gather(1, num_kept_N1 - 1), -math.inf)
    if candidates_NM.shape[1] < logits_NV.shape[1]:
        is_short_N = ((cumulative_NM[:, -1:] < top_p_N1) & (top_p_N1 < 1))[:, 0]
        if bool(is_short_N.any()):
            logits_NV, thresholds_N1, top_p_N1 = logits_NV[is_short_N], thresholds_N1[is_short_N], top_p_N1[is_short_N]
            sorted_NV = logits_NV.sort(dim=1, descending=True).values
            least_N1[is_short_N] = _compute_nucleus(logits_NV, sorted_NV, thresholds_N1, top_p_N1)
    return least_N1
