"""Sampling: logits to one token per row and its logprob, each row under its own distribution.

A row's token is determined by one uniform number, hashed from its seed and position, through the inverse of the
cumulative distribution; the rest of the batch cannot change it. The logprob is under the truncated, renormalized
distribution that the token was sampled from. The logprob of a row with non-finite logits is NaN, its token undefined.
The distribution itself is defined in `model.forward.distribution`; this module handles rows of many distributions at
once.

Axes: N rows, V vocabulary, M most likely tokens, B tiles of the vocabulary, Z tokens of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunesmith.model.forward.distribution import LogitAdjustment, has_truncation
from tunesmith.types import Distribution, Sampling, TokenDetails, TopLogprobs

NUM_CANDIDATES = 256
"""Most likely tokens that top-p considers first; it sorts the whole vocabulary only if their mass is too small."""

MAX_TILE_SIZE = 512
"""Tokens of a tile: the cumulative distribution is scanned over tiles, then within one tile."""

MAX_CACHED_ROWS, NUM_CACHED_POSITIONS = 32, 64
"""Up to this many rows take their uniform numbers from a cache of this many positions per entry."""

_INCREMENT, _FACTOR_30, _FACTOR_27 = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_SHIFT_11, _SHIFT_27, _SHIFT_30, _SHIFT_31 = map(np.uint64, (11, 27, 30, 31))


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One token per row."""

    token_ids: list[int]
    logprobs: list[float]
    """NaN in rows with logits that are not finite."""
    entropies: list[float] | None = None
    """Entropies in nats; None: no row asked for them."""
    top_logprobs: list[TopLogprobs] | None = None
    """The most likely tokens of each row; None: no row asked for them."""

    def get_details(self, rows: slice, sampling: Sampling) -> TokenDetails | None:
        """The details that the request of these rows asks for; None if it asks for none."""
        entropies = top_logprobs = None
        if sampling.return_entropy and self.entropies is not None:
            entropies = tuple(self.entropies[rows])
        if sampling.top_logprobs and self.top_logprobs is not None:
            top_logprobs = tuple(each[: sampling.top_logprobs] for each in self.top_logprobs[rows])
        if entropies is None and top_logprobs is None:
            return None
        return TokenDetails(entropies=entropies, top_logprobs=top_logprobs)


def sample_tokens(
    logits_NV: Tensor,
    distributions: Sequence[Distribution],
    seeds: Sequence[int],
    positions: Sequence[int],
    *,
    has_entropies: bool = False,
    num_top: int = 0,
    adjustment: LogitAdjustment | None = None,
) -> SamplerOutput:
    """Sample one token per row; `logits_NV` is float32 and is overwritten.

    `adjustment` has the penalties and bans of the rows. With `has_entropies` and `num_top`, the output has the entropy
    of each row's distribution and its most likely tokens.
    """
    logits_NV = logits_NV.detach()
    _add_bias(logits_NV, distributions)
    if adjustment is not None:
        logits_NV = adjustment.apply(logits_NV)
    temperatures = [distribution.temperature for distribution in distributions]
    if any(temperature not in (0.0, 1.0) for temperature in temperatures):
        divisors = [temperature or 1.0 for temperature in temperatures]
        logits_NV.div_(torch.tensor(divisors, device=logits_NV.device)[:, None])
    _truncate_rows(logits_NV, distributions)
    is_greedy = [temperature == 0 for temperature in temperatures]
    greedy_ids_N = logits_NV.argmax(dim=1) if any(is_greedy) else None
    weights_NV = logits_NV.sub_(logits_NV.amax(dim=1, keepdim=True)).exp_()
    uniforms_N = None if all(is_greedy) else hash_uniforms(seeds, positions)
    choose = _choose_on_host if logits_NV.device.type == "cpu" else _choose
    output = choose(weights_NV, greedy_ids_N, is_greedy, uniforms_N)
    if not (has_entropies or num_top):
        return output
    totals_N, entropies = weights_NV.sum(dim=1, dtype=torch.float64), None
    if has_entropies:  # in nats, of weights w with total W: log W - sum(w log w) / W
        entropies_N = totals_N.log() + torch.special.entr(weights_NV).sum(dim=1, dtype=torch.float64) / totals_N
        entropies = entropies_N.tolist()
    top_logprobs = _list_top_logprobs(weights_NV, totals_N, num_top) if num_top else None
    return replace(output, entropies=entropies, top_logprobs=top_logprobs)


def _list_top_logprobs(weights_NV: Tensor, totals_N: Tensor, num_top: int) -> list[TopLogprobs]:
    """The `num_top` most likely tokens of each row; fewer if the row's distribution has fewer."""
    top_NM = weights_NV.topk(min(num_top, weights_NV.shape[1]), dim=1)
    logprobs_NM = (top_NM.values.double() / totals_N[:, None]).log()
    rows = zip(top_NM.indices.tolist(), logprobs_NM.tolist(), strict=True)
    return [
        tuple((i, each) for i, each in zip(ids, logprobs, strict=True) if each > -math.inf) for ids, logprobs in rows
    ]


def _choose(
    weights_NV: Tensor,
    greedy_ids_N: Tensor | None,
    is_greedy: Sequence[bool],
    uniforms_N: NDArray[np.float64] | None,
) -> SamplerOutput:
    """The token of each row: the most likely one where `is_greedy`, else by its uniform number (None: all greedy).

    `weights_NV` is exp(logit - highest logit): a logit of NaN or infinity, or a row of only -inf, makes the sum NaN.
    """
    tile_sums_NB = _sum_tiles(weights_NV).cumsum(dim=1)
    totals_N = tile_sums_NB[:, -1]
    if uniforms_N is None:
        assert greedy_ids_N is not None
        ids_N = greedy_ids_N
    else:
        ids_N = _invert(weights_NV, tile_sums_NB, torch.from_numpy(uniforms_N).to(weights_NV.device))
        if greedy_ids_N is not None:
            ids_N = torch.where(torch.tensor(is_greedy, device=weights_NV.device), greedy_ids_N, ids_N)
    logprobs_N = (weights_NV.gather(1, ids_N[:, None])[:, 0].double() / totals_N).log()
    return SamplerOutput(ids_N.tolist(), logprobs_N.tolist())


def _choose_on_host(
    weights_NV: Tensor,
    greedy_ids_N: Tensor | None,
    is_greedy: Sequence[bool],
    uniforms_N: NDArray[np.float64] | None,
) -> SamplerOutput:
    """`_choose` in NumPy, whose calls cost a fraction of PyTorch's: same tokens, logprobs up to the last bit."""
    weights, rows_N = weights_NV.numpy(), np.arange(len(weights_NV))
    with np.errstate(all="ignore"):  # rows that are not finite
        cumulative_NB = _sum_tiles(weights_NV).numpy().cumsum(axis=1)
        totals_N = cumulative_NB[:, -1]
        if uniforms_N is None:
            assert greedy_ids_N is not None
            ids_N = greedy_ids_N.numpy()
        else:
            size = _choose_tile_size(weights.shape[1])
            tile_N, rest_N = _find_passing_on_host(cumulative_NB, uniforms_N * totals_N)
            tile_NZ = weights.reshape(len(weights), -1, size)[rows_N, tile_N]
            inner_N, _ = _find_passing_on_host(tile_NZ.cumsum(axis=1, dtype=np.float64), rest_N)
            ids_N = tile_N * size + inner_N
            if greedy_ids_N is not None:
                ids_N = np.where(is_greedy, greedy_ids_N.numpy(), ids_N)
        logprobs_N = np.log(weights[rows_N, ids_N] / totals_N)
    return SamplerOutput(ids_N.tolist(), logprobs_N.tolist())


def _find_passing_on_host(
    cumulative_NB: NDArray[np.float64], targets_N: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """`_find_passing` for sequential sums, which never decrease."""
    targets_N = np.minimum(targets_N, np.nextafter(cumulative_NB[:, -1], 0.0))
    index_N = np.minimum((cumulative_NB <= targets_N[:, None]).sum(axis=1), cumulative_NB.shape[1] - 1)
    before_N = cumulative_NB[np.arange(len(index_N)), index_N - 1] * (index_N > 0)
    return index_N, targets_N - before_N


def hash_uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One float64 in [0, 1) per (seed, position): splitmix64 (Steele, Lea and Flood, 2014) over one, then the other."""
    if len(seeds) > MAX_CACHED_ROWS:
        return _hash_pairs(seeds, positions)
    places = ((seed, *divmod(position, NUM_CACHED_POSITIONS)) for seed, position in zip(seeds, positions, strict=True))
    return np.array([_hash_positions(seed, block)[offset] for seed, block, offset in places])


@lru_cache(maxsize=1024)
def _hash_positions(seed: int, block: int) -> list[float]:
    """The numbers of consecutive positions, for a request that decodes one token per step."""
    first = block * NUM_CACHED_POSITIONS
    return _hash_pairs([seed] * NUM_CACHED_POSITIONS, range(first, first + NUM_CACHED_POSITIONS)).tolist()


def _hash_pairs(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    seeds_N = np.array([seed % (1 << 64) for seed in seeds], dtype=np.uint64)
    mixed_N = _mix(_mix(seeds_N) ^ np.array(positions, dtype=np.uint64))
    return np.multiply(mixed_N >> _SHIFT_11, 2.0**-53, dtype=np.float64)


def _mix(state_N: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One round of splitmix64."""
    state_N = state_N + _INCREMENT
    state_N = (state_N ^ (state_N >> _SHIFT_30)) * _FACTOR_30
    state_N = (state_N ^ (state_N >> _SHIFT_27)) * _FACTOR_27
    return state_N ^ (state_N >> _SHIFT_31)


def wrap_int64(number: int) -> int:
    """The int64 with the same bits as the number modulo 2**64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


@cache
def _choose_tile_size(vocab_size: int) -> int:
    """The largest divisor of the vocabulary size up to `MAX_TILE_SIZE`."""
    return max(size for size in range(1, MAX_TILE_SIZE + 1) if vocab_size % size == 0)


def _sum_tiles(weights_NV: Tensor) -> Tensor:
    """Weight [N, B] of each tile: far fewer numbers to scan than V."""
    num_rows, vocab_size = weights_NV.shape
    tiles = weights_NV.view(num_rows, -1, _choose_tile_size(vocab_size))
    return tiles.sum(dim=2, dtype=torch.float64)


def _invert(weights_NV: Tensor, tile_sums_NB: Tensor, uniforms_N: Tensor) -> Tensor:
    """The token at which the cumulative weight exceeds `uniform * total`; its own weight is positive."""
    num_rows, size = len(weights_NV), _choose_tile_size(weights_NV.shape[1])
    tile_N1, rest_N1 = _find_passing(tile_sums_NB, uniforms_N[:, None] * tile_sums_NB[:, -1:])
    tile_NZ = weights_NV.view(num_rows, -1, size).gather(1, tile_N1[:, :, None].expand(-1, -1, size))[:, 0]
    inner_N1, _ = _find_passing(tile_NZ.cumsum(dim=1, dtype=torch.float64), rest_N1)
    is_possible_N1 = tile_NZ.gather(1, inner_N1) > 0  # a parallel scan may round its sums downwards
    inner_N1 = torch.where(is_possible_N1, inner_N1, tile_NZ.argmax(dim=1, keepdim=True))
    return (tile_N1 * size + inner_N1)[:, 0]


def _find_passing(cumulative_NB: Tensor, targets_N1: Tensor) -> tuple[Tensor, Tensor]:
    """Index [N, 1] of the first entry above each target, and the target less the entry before it."""
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
    """Set removed tokens to -inf in rows with top-k, top-p or min-p; temperature is applied already."""
    rows = [row for row, distribution in enumerate(distributions) if has_truncation(distribution)]
    if not rows:
        return
    index = torch.tensor(rows, device=logits_NV.device)
    chosen_NV = logits_NV if len(rows) == len(distributions) else logits_NV[index]
    thresholds_N1 = _compute_thresholds(chosen_NV, [distributions[row] for row in rows])
    chosen_NV.masked_fill_(chosen_NV < thresholds_N1, -math.inf)
    if chosen_NV is not logits_NV:
        logits_NV[index] = chosen_NV


def _compute_thresholds(logits_NV: Tensor, distributions: Sequence[Distribution]) -> Tensor:
    """The smallest logit [N, 1] that each row keeps: top-k, then top-p and min-p of the rest, renormalized."""
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
    """The smallest logit [N, 1] of the nucleus: the fewest tokens with `top_p` of the mass above the threshold."""
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
