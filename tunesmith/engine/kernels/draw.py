"""One draw a row from tempered logits, without a second copy of them, and the step's bookkeeping in the same kernel.

The draw is that of `tunesmith.engine.sampling`: one uniform number hashed from the row's seed and the token's position,
put through the inverse of the cumulative distribution; temperature 0 takes the likeliest token. The kernel reads a row
three times (maximum, sum, crossing) while it lies in the cache, then writes the token where the next step reads it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _mix(state):
    state = state + 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def _draw(
    logits, temperatures, seeds, positions, ids, step, token_log, logprob_log,
    vocab_size, row_stride, num_rows, TOKENS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    tokens = tl.arange(0, TOKENS)
    temperature = tl.load(temperatures + row)
    is_greedy = temperature == 0.0
    scale = tl.where(is_greedy, 1.0, 1.0 / tl.where(is_greedy, 1.0, temperature))
    maximum = -float("inf")
    likeliest = 0
    for start in range(0, vocab_size, TOKENS):
        places = start + tokens
        x = tl.load(logits + row * row_stride + places, mask=places < vocab_size, other=-float("inf")).to(tl.float32)
        block_maximum, block_place = tl.max(x, axis=0, return_indices=True)
        likeliest = tl.where(block_maximum > maximum, start + block_place, likeliest)
        maximum = tl.maximum(maximum, block_maximum)
    total = 0.0
    for start in range(0, vocab_size, TOKENS):
        places = start + tokens
        x = tl.load(logits + row * row_stride + places, mask=places < vocab_size, other=-float("inf")).to(tl.float32)
        total += tl.sum(tl.exp((x - maximum) * scale), axis=0)
    position = tl.load(positions + row)
    state = _mix(_mix(tl.load(seeds + row).to(tl.uint64)) ^ (position + 1).to(tl.uint64))
    uniform = (state >> 40).to(tl.float32) * (1.0 / 16777216.0)
    target = uniform * total
    before = 0.0
    chosen = likeliest
    is_open = not is_greedy
    for start in range(0, vocab_size, TOKENS):
        places = start + tokens
        x = tl.load(logits + row * row_stride + places, mask=places < vocab_size, other=-float("inf")).to(tl.float32)
        weights = tl.exp((x - maximum) * scale)
        block_total = tl.sum(weights, axis=0)
        if is_open and before + block_total > target:
            has_passed = (before + tl.cumsum(weights, axis=0) > target) & (weights > 0.0)
            place = tl.min(tl.where(has_passed, places, vocab_size), axis=0)
            chosen = tl.where(place < vocab_size, place, chosen)
            is_open = place >= vocab_size
        before += block_total
    score = (tl.load(logits + row * row_stride + chosen).to(tl.float32) - maximum) * scale
    logprob = score - tl.log(total)
    at = tl.load(step) * num_rows + row
    tl.store(token_log + at, chosen)
    tl.store(logprob_log + at, logprob)
    tl.store(ids + row, chosen)
    tl.store(positions + row, position + 1)


@triton.jit
def _count(step):
    tl.store(step, tl.load(step) + 1)


def draw_tokens(
    logits_RV: Tensor,
    *,
    temperatures_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    ids_R: Tensor,
    step: Tensor,
    token_log_LR: Tensor,
    logprob_log_LR: Tensor,
) -> None:
    """Draw one token a row at position + 1, log it at line `step`, and make it the row's next input.

    Non-finite logits give a logprob that is not finite. `ids_R`, `positions_R` and `step` move on in place.
    """
    num_rows, vocab_size = logits_RV.shape
    _draw[(num_rows,)](
        logits_RV, temperatures_R, seeds_R, positions_R, ids_R, step, token_log_LR, logprob_log_LR,
        vocab_size, logits_RV.stride(0), num_rows, TOKENS=BLOCK, num_warps=8,
    )  # fmt: skip
    _count[(1,)](step)
