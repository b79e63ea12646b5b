"""Sampling kernels: logits -> one token and logprob per row, and the state of the next decode step.

Tokens are those of `engine.batch.sampler`: a uniform number hashed from the row's seed and the token's position is
mapped through the inverse CDF; temperature 0 takes the argmax. A first kernel computes the maximum and the sum of
exponentials of each vocabulary tile, in parallel over the whole device. A second one finds the tile that holds the
token and reads only that tile again. Rows with top-k, top-p or min-p search the smallest logit that they keep as a
radix search, two bits per pass, which reads their logits about ten times; other rows skip that kernel's work.

Axes: R rows, V vocabulary, I tiles of the vocabulary, L lines of the token log.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tunesmith.model.kernels.launch import get_launch_options, pdl_wait
from tunesmith.model.kernels.logprob_kernels import compute_token_logprobs

TILE = 2048
"""Vocabulary entries per program."""
SCAN_TILE = 8192
"""Vocabulary entries per loop iteration in rows with top-k, top-p or min-p."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTensors:
    """Sampling parameters and state of each row; a captured graph keeps reading and writing these tensors."""

    ids_R: Tensor
    """Int64: the last sampled token, which is the next step's input."""
    positions_R: Tensor
    """Int64: the position of that token."""
    seeds_R: Tensor
    """Int64."""
    temperatures_R: Tensor
    top_ks_R: Tensor
    """0 disables top-k."""
    top_ps_R: Tensor
    min_ps_R: Tensor
    log_lines_R: Tensor
    """Int64: a token's line of the log is this plus its position."""
    token_log_LR: Tensor
    """Int32."""
    logprob_log_LR: Tensor
    """Float32; not finite if the row's logits are not."""
    entropy_log_LR: Tensor
    """Float32, in nats; written with `has_entropies` only."""

    def narrow(self, first: int, last: int) -> SamplingTensors:
        """Views of rows `first` to `last - 1`."""
        return SamplingTensors(
            **{
                name: getattr(self, name)[:, first:last] if name.endswith("LR") else getattr(self, name)[first:last]
                for name in self.__slots__
            }
        )


ROW_ARGUMENTS = (
    "temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions", "ids", "log_lines", "token_log", "logprob_log",
    "entropy_log",
)  # fmt: skip
"""Pointers that start at any row: without specializing on their alignment one compiled kernel serves all."""


@triton.jit
def _splitmix64(state):
    state = state + 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def _get_inverse_temperature(temperature):
    """1 / temperature; 1 for greedy rows, whose logprobs come from the untempered softmax."""
    return tl.where(temperature == 0.0, 1.0, 1.0 / tl.where(temperature == 0.0, 1.0, temperature))


@triton.jit
def _weigh_score(score):
    """s exp(s), and 0 at minus infinity."""
    return tl.where(score == -float("inf"), 0.0, score * tl.exp(score))


@triton.jit(do_not_specialize_on_alignment=["temperatures"])
def _tile_softmax_kernel(
    logits, temperatures, maxima, sums, moments, vocab_size, row_stride, num_tiles, TOKENS: tl.constexpr,
    HAS_ENTROPIES: tl.constexpr, HAS_PDL: tl.constexpr,
):  # fmt: skip
    """Of each tile: the maximum, the sum of weights exp(s), and with entropies the sum of s exp(s)."""
    pdl_wait(HAS_PDL)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token_ids = tile * TOKENS + tl.arange(0, TOKENS)
    x = tl.load(logits + row * row_stride + token_ids, mask=token_ids < vocab_size, other=-float("inf")).to(tl.float32)
    maximum = tl.max(x, axis=0)
    maximum_or_0 = tl.where(maximum == -float("inf"), 0.0, maximum)
    scores = (x - maximum_or_0) * _get_inverse_temperature(tl.load(temperatures + row))
    total = tl.sum(tl.exp(scores), axis=0)
    tl.store(maxima + row * num_tiles + tile, maximum)
    tl.store(sums + row * num_tiles + tile, total)
    if HAS_ENTROPIES:
        tl.store(moments + row * num_tiles + tile, tl.sum(_weigh_score(scores), axis=0))


@triton.jit
def _to_ordered_bits(x, BITS: tl.constexpr):
    """Map float32 to uint32 such that the order is kept, and keep the first `BITS` bits."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True) >> (32 - BITS)


@triton.jit
def _sum_kept(logits, vocab_size, threshold, min_score, maximum, scale, BITS: tl.constexpr, TOKENS: tl.constexpr):
    """Number and total weight of a row's tokens at or above both the ordered-bits threshold and the score."""
    count = 0
    total = 0.0
    for start in range(0, vocab_size, TOKENS):
        token_ids = start + tl.arange(0, TOKENS)
        is_token = token_ids < vocab_size
        x = tl.load(logits + token_ids, mask=is_token, other=-float("inf")).to(tl.float32)
        scores = (x - maximum) * scale
        is_kept = is_token & (_to_ordered_bits(x, BITS) >= threshold) & (scores >= min_score)
        count += tl.sum(is_kept.to(tl.int32), axis=0)
        total += tl.sum(tl.where(is_kept, tl.exp(scores), 0.0), axis=0)
    return count, total


@triton.jit
def _find_threshold(
    logits, vocab_size, least_count, least_weight, maximum, scale, BITS: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """The largest threshold that keeps at least `least_count` tokens and `least_weight`; two bits of it per pass."""
    found = tl.full((), 0, tl.uint32)
    for step in range(BITS // 2):
        unit = tl.full((), 1, tl.uint32) << (BITS - 2 - 2 * step)
        count_1, count_2, count_3 = 0, 0, 0
        weight_1, weight_2, weight_3 = 0.0, 0.0, 0.0
        for start in range(0, vocab_size, TOKENS):
            token_ids = start + tl.arange(0, TOKENS)
            is_token = token_ids < vocab_size
            x = tl.load(logits + token_ids, mask=is_token, other=-float("inf")).to(tl.float32)
            weights = tl.where(is_token, tl.exp((x - maximum) * scale), 0.0)
            ordered = _to_ordered_bits(x, BITS)
            is_1, is_2, is_3 = ordered >= found + unit, ordered >= found + 2 * unit, ordered >= found + 3 * unit
            count_1 += tl.sum((is_token & is_1).to(tl.int32), axis=0)
            count_2 += tl.sum((is_token & is_2).to(tl.int32), axis=0)
            count_3 += tl.sum((is_token & is_3).to(tl.int32), axis=0)
            weight_1 += tl.sum(tl.where(is_1, weights, 0.0), axis=0)
            weight_2 += tl.sum(tl.where(is_2, weights, 0.0), axis=0)
            weight_3 += tl.sum(tl.where(is_3, weights, 0.0), axis=0)
        is_past_1 = (count_1 >= least_count) & (weight_1 >= least_weight)
        is_past_2 = (count_2 >= least_count) & (weight_2 >= least_weight)
        is_past_3 = (count_3 >= least_count) & (weight_3 >= least_weight)
        found += tl.where(is_past_3, 3, tl.where(is_past_2, 2, tl.where(is_past_1, 1, 0))).to(tl.uint32) * unit
    return found


@triton.jit
def _hash_uniform(seed, position):
    """A 24-bit number in [0, 1) from the row's seed and the position of the token to sample."""
    state = _splitmix64(_splitmix64(seed.to(tl.uint64)) ^ position.to(tl.uint64))
    return (state >> 40).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def _merge_tiles(maxima, sums, row, num_tiles, scale, TILES: tl.constexpr):
    """The row's maximum, the first tile that holds it, and each tile's sum of weights relative to that maximum."""
    tiles = tl.arange(0, TILES)
    is_tile = tiles < num_tiles
    tile_maxima = tl.load(maxima + row * num_tiles + tiles, mask=is_tile, other=-float("inf"))
    maximum, argmax_tile = tl.max(tile_maxima, axis=0, return_indices=True)
    weights = tl.load(sums + row * num_tiles + tiles, mask=is_tile, other=0.0)
    weights *= tl.where(is_tile, tl.exp((tile_maxima - maximum) * scale), 0.0)
    return maximum, argmax_tile, weights


@triton.jit
def _merge_moments(moments, weights, maxima, maximum, row, num_tiles, scale, TILES: tl.constexpr):
    """The row's sum of s exp(s) relative to its maximum, from the moments and rescaled sums of its tiles."""
    tiles = tl.arange(0, TILES)
    is_tile = tiles < num_tiles
    shifts = (tl.load(maxima + row * num_tiles + tiles, mask=is_tile, other=-float("inf")) - maximum) * scale
    is_possible = is_tile & (shifts > -float("inf"))
    shifts = tl.where(is_possible, shifts, 0.0)
    tile_moments = tl.load(moments + row * num_tiles + tiles, mask=is_tile, other=0.0)
    return tl.sum(tl.where(is_possible, tl.exp(shifts) * tile_moments + shifts * weights, 0.0), axis=0)


@triton.jit
def _has_truncation(temperature, top_k, top_p, min_p):
    """Whether top-k, top-p or min-p applies to the row."""
    return (temperature != 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))


@triton.jit(do_not_specialize_on_alignment=ROW_ARGUMENTS)
def _sample_truncated_kernel(
    logits, maxima, sums, moments, temperatures, top_ks, top_ps, min_ps, seeds, positions, ids,
    log_lines, token_log, logprob_log, entropy_log,
    vocab_size, row_stride, num_tiles, log_stride,
    TILES: tl.constexpr, TOKENS: tl.constexpr, BITS: tl.constexpr, HAS_ENTROPIES: tl.constexpr, HAS_PDL: tl.constexpr,
):  # fmt: skip
    """Sample the rows with top-k, top-p or min-p; `_sample_kernel` advances their positions."""
    pdl_wait(HAS_PDL)
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    temperature, position = tl.load(temperatures + row), tl.load(positions + row)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    if _has_truncation(temperature, top_k, top_p, min_p):
        scale = _get_inverse_temperature(temperature)
        maximum, _argmax_tile, _weights = _merge_tiles(maxima, sums, row, num_tiles, scale, TILES)
        minus_infinity = -float("inf")
        threshold = tl.full((), 0, tl.uint32)
        if top_k > 0 and top_k < vocab_size:
            threshold = _find_threshold(logits, vocab_size, top_k, 0.0, maximum, scale, BITS, TOKENS)
        if top_p < 1.0:
            _count, kept = _sum_kept(logits, vocab_size, threshold, minus_infinity, maximum, scale, BITS, TOKENS)
            threshold_of_p = _find_threshold(logits, vocab_size, 1, top_p * kept, maximum, scale, BITS, TOKENS)
            threshold = tl.maximum(threshold, threshold_of_p)
        min_score = tl.where(min_p > 0.0, tl.log(tl.where(min_p > 0.0, min_p, 1.0)), minus_infinity)
        _num_kept, total = _sum_kept(logits, vocab_size, threshold, min_score, maximum, scale, BITS, TOKENS)
        target = _hash_uniform(tl.load(seeds + row), position + 1) * total
        before = 0.0
        moment = 0.0
        chosen = 0
        is_searching = True
        for start in range(0, vocab_size, TOKENS):
            token_ids = start + tl.arange(0, TOKENS)
            is_token = token_ids < vocab_size
            x = tl.load(logits + token_ids, mask=is_token, other=-float("inf")).to(tl.float32)
            scores = (x - maximum) * scale
            is_kept = is_token & (_to_ordered_bits(x, BITS) >= threshold) & (scores >= min_score)
            kept = tl.where(is_kept, tl.exp(scores), 0.0)
            here = tl.sum(kept, axis=0)
            if HAS_ENTROPIES:
                moment += tl.sum(tl.where(is_kept, _weigh_score(scores), 0.0), axis=0)
            if is_searching and here > 0.0:
                is_past = (before + tl.cumsum(kept, axis=0) > target) & (kept > 0.0)
                token_id = tl.min(tl.where(is_past, token_ids, vocab_size))
                last = tl.max(tl.where(kept > 0.0, token_ids, 0))
                chosen = tl.where(token_id < vocab_size, token_id, last)  # last kept token if sums round down
                is_searching = token_id >= vocab_size
            before += here
        logprob = (tl.load(logits + chosen).to(tl.float32) - maximum) * scale - tl.log(total)
        at = (tl.load(log_lines + row) + position + 1) * log_stride + row
        tl.store(token_log + at, chosen)
        tl.store(logprob_log + at, logprob)
        if HAS_ENTROPIES:
            tl.store(entropy_log + at, tl.log(total) - moment / total)
        tl.store(ids + row, tl.cast(chosen, tl.int64))


@triton.jit(do_not_specialize_on_alignment=ROW_ARGUMENTS)
def _sample_kernel(
    logits, maxima, sums, moments, temperatures, top_ks, top_ps, min_ps, seeds, positions, ids,
    log_lines, token_log, logprob_log, entropy_log,
    vocab_size, row_stride, num_tiles, log_stride,
    TILES: tl.constexpr, TOKENS: tl.constexpr, HAS_TRUNCATION: tl.constexpr, HAS_ENTROPIES: tl.constexpr,
    HAS_PDL: tl.constexpr,
):  # fmt: skip
    """Sample the other rows, and advance the position of every row."""
    pdl_wait(HAS_PDL)
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    temperature, position = tl.load(temperatures + row), tl.load(positions + row)
    is_greedy = temperature == 0.0
    scale = _get_inverse_temperature(temperature)
    maximum, argmax_tile, weights = _merge_tiles(maxima, sums, row, num_tiles, scale, TILES)
    tiles = tl.arange(0, TILES)
    total = tl.sum(weights, axis=0)
    target = _hash_uniform(tl.load(seeds + row), position + 1) * total
    crossing_tile = tl.min(tl.where((tl.cumsum(weights, axis=0) > target) & (weights > 0.0), tiles, TILES))
    if HAS_ENTROPIES:
        moment = _merge_moments(moments, weights, maxima, maximum, row, num_tiles, scale, TILES)
    last_tile = tl.max(tl.where(weights > 0.0, tiles, 0))
    tile = tl.where(is_greedy, argmax_tile, tl.where(crossing_tile < TILES, crossing_tile, last_tile))
    before = tl.sum(tl.where(tiles < tile, weights, 0.0), axis=0)
    token_ids = tile * TOKENS + tl.arange(0, TOKENS)
    x = tl.load(logits + token_ids, mask=token_ids < vocab_size, other=-float("inf")).to(tl.float32)
    weights_here = tl.exp((x - maximum) * scale)
    is_past = (before + tl.cumsum(weights_here, axis=0) > target) & (weights_here > 0.0)
    token_id = tl.min(tl.where(tl.where(is_greedy, x == maximum, is_past), token_ids, vocab_size))
    last = tl.max(tl.where((weights_here > 0.0) & (token_ids < vocab_size), token_ids, 0))
    chosen = tl.where(token_id < vocab_size, token_id, last)
    logprob = (tl.load(logits + chosen).to(tl.float32) - maximum) * scale - tl.log(total)
    is_sampled_here = True
    if HAS_TRUNCATION:
        top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
        is_sampled_here = not _has_truncation(temperature, top_k, top_p, min_p)
    at = (tl.load(log_lines + row) + position + 1) * log_stride + row
    tl.store(token_log + at, chosen, mask=is_sampled_here)
    tl.store(logprob_log + at, logprob, mask=is_sampled_here)
    if HAS_ENTROPIES:
        tl.store(entropy_log + at, tl.log(total) - moment / total, mask=is_sampled_here)
    tl.store(ids + row, tl.cast(chosen, tl.int64), mask=is_sampled_here)
    tl.store(positions + row, position + 1)


def sample_next_tokens(logits_RV: Tensor, rows: SamplingTensors, *, has_truncation: bool, has_entropies: bool) -> None:
    """Sample one token per row for position + 1, log it, and make it the row's next input, all in place.

    `has_truncation`: some row may have top-k, top-p or min-p. `has_entropies`: also log each distribution's entropy.
    """
    num_rows, vocab_size = logits_RV.shape
    num_tiles = triton.cdiv(vocab_size, TILE)
    maxima_RI = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=logits_RV.device)
    sums_RI = torch.empty_like(maxima_RI)
    moments_RI = torch.empty_like(maxima_RI) if has_entropies else sums_RI  # not read without entropies
    options = get_launch_options()
    _tile_softmax_kernel[(num_rows, num_tiles)](
        logits_RV, rows.temperatures_R, maxima_RI, sums_RI, moments_RI, vocab_size, logits_RV.stride(0), num_tiles,
        TOKENS=TILE, HAS_ENTROPIES=has_entropies, num_warps=4, **options,
    )  # fmt: skip
    arguments = (
        logits_RV, maxima_RI, sums_RI, moments_RI, rows.temperatures_R, rows.top_ks_R, rows.top_ps_R, rows.min_ps_R,
        rows.seeds_R, rows.positions_R, rows.ids_R, rows.log_lines_R, rows.token_log_LR, rows.logprob_log_LR,
        rows.entropy_log_LR,
        vocab_size, logits_RV.stride(0), num_tiles, rows.token_log_LR.stride(0),
    )  # fmt: skip
    tiles = triton.next_power_of_2(num_tiles)
    if has_truncation:
        bits = 16 if logits_RV.dtype == torch.bfloat16 else 32
        _sample_truncated_kernel[(num_rows,)](
            *arguments, TILES=tiles, TOKENS=SCAN_TILE, BITS=bits, HAS_ENTROPIES=has_entropies, num_warps=16, **options
        )
    _sample_kernel[(num_rows,)](
        *arguments,
        TILES=tiles,
        TOKENS=TILE,
        HAS_TRUNCATION=has_truncation,
        HAS_ENTROPIES=has_entropies,
        num_warps=4,
        **options,
    )


@triton.jit(do_not_specialize_on_alignment=ROW_ARGUMENTS)
def _replace_logprobs_kernel(
    logprobs, temperatures, top_ks, top_ps, min_ps, positions, log_lines, logprob_log, log_stride,
    HAS_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(HAS_PDL)
    row = tl.program_id(0)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    is_plain = (tl.load(temperatures + row) == 1.0) & (top_k == 0) & (top_p >= 1.0) & (min_p == 0.0)
    at = (tl.load(log_lines + row) + tl.load(positions + row)) * log_stride + row
    tl.store(logprob_log + at, tl.load(logprobs + row), mask=is_plain)


def log_trainer_logprobs(logits_RV: Tensor, rows: SamplingTensors) -> None:
    """Replace the logprobs just logged by those of the trainer's kernel, in rows that sample from the whole
    distribution at temperature 1: its sums have another order (`model/forward/exact.py`)."""
    logprobs_R, _, _ = compute_token_logprobs(logits_RV, rows.ids_R, scale_before=1.0, scale_after=1.0, softcap=0.0)
    _replace_logprobs_kernel[(len(logprobs_R),)](
        logprobs_R, rows.temperatures_R, rows.top_ks_R, rows.top_ps_R, rows.min_ps_R, rows.positions_R,
        rows.log_lines_R, rows.logprob_log_LR, rows.logprob_log_LR.stride(0), num_warps=1, **get_launch_options(),
    )  # fmt: skip
