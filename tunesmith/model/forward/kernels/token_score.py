"""Logprob of one token and entropy of each row of logits, and the way back, in one pass each.

A logit x becomes `scale_after * cap(scale_before * x)`, with cap(y) = softcap * tanh(y / softcap) where there is one.
The backward writes its gradients over the logits they belong to: in bfloat16 they fill the front half of each row.

Axes: N positions, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Tokens of the vocabulary that a program holds at once."""


@triton.jit
def _transform(logits, scale_before, scale_after, softcap, HAS_SOFTCAP: tl.constexpr):
    logits *= scale_before
    if HAS_SOFTCAP:
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
    return logits * scale_after


@triton.jit
def _score(
    logits, targets, logprobs, entropies, log_sums, scale_before, scale_after, softcap, vocab_size,
    HAS_SOFTCAP: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab_size
    tokens = tl.arange(0, TOKENS)
    maxima = tl.full((TOKENS,), -1.0e30, tl.float32)
    sums, products = tl.zeros((TOKENS,), tl.float32), tl.zeros((TOKENS,), tl.float32)
    for start in range(0, vocab_size, TOKENS):
        is_token = start + tokens < vocab_size
        x = tl.load(logits + start + tokens, mask=is_token, other=0.0)
        x = tl.where(is_token, _transform(x, scale_before, scale_after, softcap, HAS_SOFTCAP), -1.0e30)
        higher = tl.maximum(maxima, x)
        shrink, weight = tl.exp(maxima - higher), tl.exp(x - higher)
        products = shrink * (products + sums * (maxima - higher)) + weight * (x - higher)
        sums = sums * shrink + weight
        maxima = higher
    maximum = tl.max(maxima, axis=0)
    shrink = tl.exp(maxima - maximum)
    total = tl.sum(sums * shrink, axis=0)
    product = tl.sum(shrink * (products + sums * (maxima - maximum)), axis=0)
    log_total = tl.log(total)
    chosen = tl.load(logits + tl.load(targets + row))
    chosen = _transform(chosen, scale_before, scale_after, softcap, HAS_SOFTCAP)
    tl.store(logprobs + row, chosen - maximum - log_total)
    tl.store(entropies + row, log_total - product / total)
    tl.store(log_sums + row, maximum + log_total)


@triton.jit
def _grade(
    logits, grads, targets, log_sums, entropies, grad_logprobs, grad_entropies,
    scale_before, scale_after, softcap, vocab_size, grad_stride,
    HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab_size
    grads += row * grad_stride
    target, log_sum = tl.load(targets + row), tl.load(log_sums + row)
    grad_logprob = tl.load(grad_logprobs + row)
    tokens = tl.arange(0, TOKENS)
    for start in range(0, vocab_size, TOKENS):
        is_token = start + tokens < vocab_size
        x = tl.load(logits + start + tokens, mask=is_token, other=0.0)
        y = _transform(x, scale_before, scale_after, softcap, HAS_SOFTCAP)
        surprise = y - log_sum
        weight = tl.exp(surprise)
        grad = tl.where(start + tokens == target, grad_logprob, 0.0) - weight * grad_logprob
        if HAS_ENTROPY:
            grad -= tl.load(grad_entropies + row) * weight * (surprise + tl.load(entropies + row))
        if HAS_SOFTCAP:
            share = y / (scale_after * softcap)
            grad *= 1.0 - share * share
        tl.debug_barrier()  # the grads of this block lie over logits of this block and of earlier ones
        grad *= scale_before * scale_after
        tl.store(grads + start + tokens, grad.to(grads.dtype.element_ty), mask=is_token)


def score_tokens(
    logits_NV: Tensor, target_N: Tensor, *, scale_before: float, scale_after: float, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs [N] of the targets, entropies [N] and log-sums [N] of contiguous float32 logits; softcap 0 is none."""
    num_rows, vocab_size = logits_NV.shape
    logprobs_N, entropies_N, log_sums_N = (logits_NV.new_empty(num_rows) for _ in range(3))
    _score[(num_rows,)](
        logits_NV, target_N, logprobs_N, entropies_N, log_sums_N, scale_before, scale_after, softcap or 1.0, vocab_size,
        HAS_SOFTCAP=softcap > 0, TOKENS=BLOCK, num_warps=8,
    )  # fmt: skip
    return logprobs_N, entropies_N, log_sums_N


def grade_logits(
    logits_NV: Tensor,
    target_N: Tensor,
    log_sums_N: Tensor,
    entropies_N: Tensor,
    grad_logprobs_N: Tensor,
    grad_entropies_N: Tensor | None,
    *,
    scale_before: float,
    scale_after: float,
    softcap: float,
    dtype: torch.dtype,
) -> Tensor:
    """Gradients [N, V] of the logits, in a type of 16 bits, in the memory of the logits, which are lost."""
    num_rows, vocab_size = logits_NV.shape
    grads_NV = logits_NV.view(dtype)[:, :vocab_size]
    _grade[(num_rows,)](
        logits_NV, grads_NV, target_N, log_sums_N, entropies_N, grad_logprobs_N,
        entropies_N if grad_entropies_N is None else grad_entropies_N,
        scale_before, scale_after, softcap or 1.0, vocab_size, grads_NV.stride(0),
        HAS_SOFTCAP=softcap > 0, HAS_ENTROPY=grad_entropies_N is not None, TOKENS=BLOCK, num_warps=8,
    )  # fmt: skip
    return grads_NV
