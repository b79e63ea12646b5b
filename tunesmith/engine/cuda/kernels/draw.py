"""One token a row from logits that are read once, and the step's bookkeeping in the same kernel.

The draw is that of `engine.batch.sampler`: one uniform number hashed from the row's seed and the token's position,
put through the inverse of the cumulative distribution; temperature 0 takes the likeliest token. Blocks of a row are
measured first (maximum, and sum of weights under it), side by side over the whole device or by the head itself; the
draw then finds the block that holds the token and reads that one again. Rows that drop tokens (top-k, top-p, min-p)
find the least logit they keep two bits at a time, which reads their logits some ten times; other rows pay nothing.

Axes: R rows, V vocabulary, B blocks, L lines of the log.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tunesmith.engine.cuda.kernels.launch import begin, get_launch_options

BLOCK = 2048
"""Tokens measured by one program."""
SCAN = 8192
"""Tokens read at once by rows that drop some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What the draw reads and writes of each row, as tensors on the device that a captured step goes on using."""

    ids_R: Tensor
    """Int64: the token that was drawn last, the step's input."""
    positions_R: Tensor
    """Int64: where that token stands."""
    seeds_R: Tensor
    """Int64."""
    temperatures_R: Tensor
    top_ks_R: Tensor
    """0 keeps all."""
    top_ps_R: Tensor
    min_ps_R: Tensor
    lines_R: Tensor
    """Int64: the log's line of a token, less its position."""
    token_log_LR: Tensor
    """Int32."""
    logprob_log_LR: Tensor
    """Float32; not finite where the row's logits were not."""

    def narrow(self, first: int, last: int) -> Rows:
        """Some rows of the same tensors."""
        return Rows(
            **{
                name: getattr(self, name)[:, first:last] if name.endswith("LR") else getattr(self, name)[first:last]
                for name in self.__slots__
            }
        )


PER_ROW = (
    "temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions", "ids", "lines", "token_log", "logprob_log",
)  # fmt: skip
"""Arguments that begin at the first row that is drawn: one kernel serves whichever that is."""


@triton.jit
def _mix(state):
    state = state + 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def _get_scale(temperature):
    """What logits are multiplied by; greedy rows have the untempered softmax."""
    return tl.where(temperature == 0.0, 1.0, 1.0 / tl.where(temperature == 0.0, 1.0, temperature))


@triton.jit(do_not_specialize_on_alignment=["temperatures"])
def _measure(
    logits, temperatures, maxima, sums, vocab_size, row_stride, num_blocks, TOKENS: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):  # fmt: skip
    begin(IS_CHAINED)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = block * TOKENS + tl.arange(0, TOKENS)
    x = tl.load(logits + row * row_stride + places, mask=places < vocab_size, other=-float("inf")).to(tl.float32)
    maximum = tl.max(x, axis=0)
    least = tl.where(maximum == -float("inf"), 0.0, maximum)
    total = tl.sum(tl.exp((x - least) * _get_scale(tl.load(temperatures + row))), axis=0)
    tl.store(maxima + row * num_blocks + block, maximum)
    tl.store(sums + row * num_blocks + block, total)


@triton.jit
def _rank(x, BITS: tl.constexpr):
    """Unsigned integers in the order of the float32 numbers, which hold no more than their first `BITS` bits."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True) >> (32 - BITS)


@triton.jit
def _weigh_kept(logits, vocab_size, rank, least_score, maximum, scale, BITS: tl.constexpr, TOKENS: tl.constexpr):
    """Number and weight of a row's tokens at or above a rank and a score."""
    count = 0
    total = 0.0
    for start in range(0, vocab_size, TOKENS):
        places = start + tl.arange(0, TOKENS)
        is_token = places < vocab_size
        x = tl.load(logits + places, mask=is_token, other=-float("inf")).to(tl.float32)
        scores = (x - maximum) * scale
        is_kept = is_token & (_rank(x, BITS) >= rank) & (scores >= least_score)
        count += tl.sum(is_kept.to(tl.int32), axis=0)
        total += tl.sum(tl.where(is_kept, tl.exp(scores), 0.0), axis=0)
    return count, total


@triton.jit
def _find_rank(
    logits, vocab_size, least_count, least_weight, maximum, scale, BITS: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """The highest rank at or above which so many tokens of so much weight lie; two bits of it in each pass."""
    found = tl.full((), 0, tl.uint32)
    for step in range(BITS // 2):
        unit = tl.full((), 1, tl.uint32) << (BITS - 2 - 2 * step)
        count_1, count_2, count_3 = 0, 0, 0
        weight_1, weight_2, weight_3 = 0.0, 0.0, 0.0
        for start in range(0, vocab_size, TOKENS):
            places = start + tl.arange(0, TOKENS)
            is_token = places < vocab_size
            x = tl.load(logits + places, mask=is_token, other=-float("inf")).to(tl.float32)
            weights = tl.where(is_token, tl.exp((x - maximum) * scale), 0.0)
            ranks = _rank(x, BITS)
            is_1, is_2, is_3 = ranks >= found + unit, ranks >= found + 2 * unit, ranks >= found + 3 * unit
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
    """A number in [0, 1) of 24 bits, made of the row's seed and the drawn token's position."""
    state = _mix(_mix(seed.to(tl.uint64)) ^ position.to(tl.uint64))
    return (state >> 40).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def _combine(maxima, sums, row, num_blocks, scale, BLOCKS: tl.constexpr):
    """A row's maximum, the first block that holds it, and each block's weight under that maximum."""
    blocks = tl.arange(0, BLOCKS)
    is_block = blocks < num_blocks
    block_maxima = tl.load(maxima + row * num_blocks + blocks, mask=is_block, other=-float("inf"))
    maximum, likeliest = tl.max(block_maxima, axis=0, return_indices=True)
    weights = tl.load(sums + row * num_blocks + blocks, mask=is_block, other=0.0)
    weights *= tl.where(is_block, tl.exp((block_maxima - maximum) * scale), 0.0)
    return maximum, likeliest, weights


@triton.jit
def _is_cut(temperature, top_k, top_p, min_p):
    """The row drops tokens."""
    return (temperature != 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def _draw_cut(
    logits, maxima, sums, temperatures, top_ks, top_ps, min_ps, seeds, positions, ids, lines, token_log, logprob_log,
    vocab_size, row_stride, num_blocks, log_stride,
    BLOCKS: tl.constexpr, TOKENS: tl.constexpr, BITS: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Draw the rows that drop tokens, and leave the moving on to `_draw`."""
    begin(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    temperature, position = tl.load(temperatures + row), tl.load(positions + row)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    if _is_cut(temperature, top_k, top_p, min_p):
        scale = _get_scale(temperature)
        maximum, _likeliest, _weights = _combine(maxima, sums, row, num_blocks, scale, BLOCKS)
        no_score = -float("inf")
        rank = tl.full((), 0, tl.uint32)
        if top_k > 0 and top_k < vocab_size:
            rank = _find_rank(logits, vocab_size, top_k, 0.0, maximum, scale, BITS, TOKENS)
        if top_p < 1.0:
            _count, kept = _weigh_kept(logits, vocab_size, rank, no_score, maximum, scale, BITS, TOKENS)
            rank_of_p = _find_rank(logits, vocab_size, 1, top_p * kept, maximum, scale, BITS, TOKENS)
            rank = tl.maximum(rank, rank_of_p)
        least_score = tl.where(min_p > 0.0, tl.log(tl.where(min_p > 0.0, min_p, 1.0)), no_score)
        _num_kept, total = _weigh_kept(logits, vocab_size, rank, least_score, maximum, scale, BITS, TOKENS)
        target = _hash_uniform(tl.load(seeds + row), position + 1) * total
        before = 0.0
        chosen = 0
        is_open = True
        for start in range(0, vocab_size, TOKENS):
            places = start + tl.arange(0, TOKENS)
            is_token = places < vocab_size
            x = tl.load(logits + places, mask=is_token, other=-float("inf")).to(tl.float32)
            scores = (x - maximum) * scale
            is_kept = is_token & (_rank(x, BITS) >= rank) & (scores >= least_score)
            kept = tl.where(is_kept, tl.exp(scores), 0.0)
            here = tl.sum(kept, axis=0)
            if is_open and here > 0.0:
                place = tl.min(tl.where((before + tl.cumsum(kept, axis=0) > target) & (kept > 0.0), places, vocab_size))
                last = tl.max(tl.where(kept > 0.0, places, 0))
                chosen = tl.where(place < vocab_size, place, last)  # if sums round down, the last that is possible
                is_open = place >= vocab_size
            before += here
        logprob = (tl.load(logits + chosen).to(tl.float32) - maximum) * scale - tl.log(total)
        at = (tl.load(lines + row) + position + 1) * log_stride + row
        tl.store(token_log + at, chosen)
        tl.store(logprob_log + at, logprob)
        tl.store(ids + row, tl.cast(chosen, tl.int64))


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def _draw(
    logits, maxima, sums, temperatures, top_ks, top_ps, min_ps, seeds, positions, ids, lines, token_log, logprob_log,
    vocab_size, row_stride, num_blocks, log_stride,
    BLOCKS: tl.constexpr, TOKENS: tl.constexpr, HAS_CUTS: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Draw the rows that drop no token, and move every row on."""
    begin(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    temperature, position = tl.load(temperatures + row), tl.load(positions + row)
    is_greedy = temperature == 0.0
    scale = _get_scale(temperature)
    maximum, likeliest, weights = _combine(maxima, sums, row, num_blocks, scale, BLOCKS)
    blocks = tl.arange(0, BLOCKS)
    total = tl.sum(weights, axis=0)
    target = _hash_uniform(tl.load(seeds + row), position + 1) * total
    crossing = tl.min(tl.where((tl.cumsum(weights, axis=0) > target) & (weights > 0.0), blocks, BLOCKS))
    possible = tl.max(tl.where(weights > 0.0, blocks, 0))
    block = tl.where(is_greedy, likeliest, tl.where(crossing < BLOCKS, crossing, possible))
    before = tl.sum(tl.where(blocks < block, weights, 0.0), axis=0)
    places = block * TOKENS + tl.arange(0, TOKENS)
    x = tl.load(logits + places, mask=places < vocab_size, other=-float("inf")).to(tl.float32)
    inside = tl.exp((x - maximum) * scale)
    has_passed = (before + tl.cumsum(inside, axis=0) > target) & (inside > 0.0)
    place = tl.min(tl.where(tl.where(is_greedy, x == maximum, has_passed), places, vocab_size))
    last = tl.max(tl.where((inside > 0.0) & (places < vocab_size), places, 0))
    chosen = tl.where(place < vocab_size, place, last)
    logprob = (tl.load(logits + chosen).to(tl.float32) - maximum) * scale - tl.log(total)
    is_ours = True
    if HAS_CUTS:
        is_ours = not _is_cut(temperature, tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row))
    at = (tl.load(lines + row) + position + 1) * log_stride + row
    tl.store(token_log + at, chosen, mask=is_ours)
    tl.store(logprob_log + at, logprob, mask=is_ours)
    tl.store(ids + row, tl.cast(chosen, tl.int64), mask=is_ours)
    tl.store(positions + row, position + 1)


def draw_tokens(logits_RV: Tensor, rows: Rows, *, has_cuts: bool) -> None:
    """Draw one token a row at position + 1, log it, and make it the row's next input; rows move on in place.

    `has_cuts` says that some row may drop tokens.
    """
    num_rows, vocab_size = logits_RV.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    maxima_RB = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logits_RV.device)
    sums_RB = torch.empty_like(maxima_RB)
    options = get_launch_options()
    _measure[(num_rows, num_blocks)](
        logits_RV, rows.temperatures_R, maxima_RB, sums_RB, vocab_size, logits_RV.stride(0), num_blocks,
        TOKENS=BLOCK, num_warps=4, **options,
    )  # fmt: skip
    arguments = (
        logits_RV, maxima_RB, sums_RB, rows.temperatures_R, rows.top_ks_R, rows.top_ps_R, rows.min_ps_R, rows.seeds_R,
        rows.positions_R, rows.ids_R, rows.lines_R, rows.token_log_LR, rows.logprob_log_LR,
        vocab_size, logits_RV.stride(0), num_blocks, rows.token_log_LR.stride(0),
    )  # fmt: skip
    blocks = triton.next_power_of_2(num_blocks)
    if has_cuts:
        bits = 16 if logits_RV.dtype == torch.bfloat16 else 32
        _draw_cut[(num_rows,)](*arguments, BLOCKS=blocks, TOKENS=SCAN, BITS=bits, num_warps=16, **options)
    _draw[(num_rows,)](*arguments, BLOCKS=blocks, TOKENS=BLOCK, HAS_CUTS=has_cuts, num_warps=4, **options)
