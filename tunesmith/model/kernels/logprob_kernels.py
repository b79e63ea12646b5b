"""Fused head and log-softmax on a GPU: hidden states -> logprob and entropy per token, and the backward.

The float32 logits of a chunk exist once. One kernel reads them; in the backward another overwrites them with their
gradients. Both make one pass over the logits. Triton is installed on CUDA machines only, so import this file there
only.

A logit x becomes `scale_after * cap(scale_before * x)`, with cap(y) = softcap * tanh(y / softcap) if a softcap is set.
Gradients in 16 bits fill the first half of each float32 row.

Axes: N positions, C hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from tunesmith.model.merged_weights import accumulate_weight_grads

TILE = 4096
"""Vocabulary entries per loop iteration."""


@triton.jit
def _transform(logits, scale_before, scale_after, softcap, HAS_SOFTCAP: tl.constexpr):
    logits *= scale_before
    if HAS_SOFTCAP:
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
    return logits * scale_after


@triton.jit
def _logprob_forward_kernel(
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
        new_maxima = tl.maximum(maxima, x)
        rescale, weight = tl.exp(maxima - new_maxima), tl.exp(x - new_maxima)
        products = rescale * (products + sums * (maxima - new_maxima)) + weight * (x - new_maxima)
        sums = sums * rescale + weight
        maxima = new_maxima
    maximum = tl.max(maxima, axis=0)
    rescale = tl.exp(maxima - maximum)
    total = tl.sum(sums * rescale, axis=0)
    product = tl.sum(rescale * (products + sums * (maxima - maximum)), axis=0)
    log_total = tl.log(total)
    chosen = tl.load(logits + tl.load(targets + row))
    chosen = _transform(chosen, scale_before, scale_after, softcap, HAS_SOFTCAP)
    tl.store(logprobs + row, chosen - maximum - log_total)
    tl.store(entropies + row, log_total - product / total)
    tl.store(log_sums + row, maximum + log_total)


@triton.jit
def _logprob_backward_kernel(
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
        tl.debug_barrier()  # the gradients of this tile overwrite logits of this and earlier tiles
        grad *= scale_before * scale_after
        tl.store(grads + start + tokens, grad.to(grads.dtype.element_ty), mask=is_token)


def compute_token_logprobs(
    logits_NV: Tensor, target_N: Tensor, *, scale_before: float, scale_after: float, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs [N] of the targets, entropies [N] and log-sum-exps [N] of contiguous float32 logits; softcap 0: none."""
    num_rows, vocab_size = logits_NV.shape
    logprobs_N, entropies_N, log_sums_N = (logits_NV.new_empty(num_rows) for _ in range(3))
    _logprob_forward_kernel[(num_rows,)](
        logits_NV, target_N, logprobs_N, entropies_N, log_sums_N, scale_before, scale_after, softcap or 1.0, vocab_size,
        HAS_SOFTCAP=softcap > 0, TOKENS=TILE, num_warps=8,
    )  # fmt: skip
    return logprobs_N, entropies_N, log_sums_N


def compute_logit_grads(
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
    """Gradients [N, V] of the logits in a 16-bit dtype; they overwrite the logits."""
    num_rows, vocab_size = logits_NV.shape
    grads_NV = logits_NV.view(dtype)[:, :vocab_size]
    _logprob_backward_kernel[(num_rows,)](
        logits_NV, grads_NV, target_N, log_sums_N, entropies_N, grad_logprobs_N,
        entropies_N if grad_entropies_N is None else grad_entropies_N,
        scale_before, scale_after, softcap or 1.0, vocab_size, grads_NV.stride(0),
        HAS_SOFTCAP=softcap > 0, HAS_ENTROPY=grad_entropies_N is not None, TOKENS=TILE, num_warps=8,
    )  # fmt: skip
    return grads_NV


class FusedLogprob(torch.autograd.Function):
    """Logprobs [N] of the targets and entropies [N]; entropies take gradients if `with_entropy`.

    If the weight's `grad_dtype` is float32, its gradient is accumulated into `weight.grad` in place here, so that the
    sum over chunks is neither rounded nor copied. Such a gradient is available through `backward` only, not through
    `torch.autograd.grad`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NC: Tensor,
        weight_VC: Tensor,
        target_N: Tensor,
        transform: tuple[float, float, float],
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        scale_before, softcap, scale_after = transform
        ctx.scales = {"scale_before": scale_before, "softcap": softcap, "scale_after": scale_after}
        logits_NV = torch.mm(hidden_NC, weight_VC.t(), out_dtype=torch.float32)
        logprobs_N, entropy_N, log_sums_N = compute_token_logprobs(logits_NV, target_N, **ctx.scales)
        ctx.save_for_backward(hidden_NC, logits_NV, target_N, log_sums_N, entropy_N)
        ctx.weight = weight_VC
        ctx.with_entropy = with_entropy
        if not with_entropy:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_N: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NC, logits_NV, target_N, log_sums_N, entropy_N = ctx.saved_tensors
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        grad_NV = compute_logit_grads(
            logits_NV,
            target_N,
            log_sums_N,
            entropy_N,
            grad_logprobs_N.contiguous(),
            grad_entropy_N.contiguous() if ctx.with_entropy else None,
            dtype=hidden_NC.dtype,
            **ctx.scales,
        )
        grad_hidden_NC = grad_NV @ ctx.weight if needs_hidden else None
        grad_weight_VC = compute_weight_grad(ctx.weight, grad_NV, hidden_NC) if needs_weight else None
        return grad_hidden_NC, grad_weight_VC, None, None, None


def compute_weight_grad(weight_VC: Tensor, grad_NV: Tensor, hidden_NC: Tensor) -> Tensor | None:
    """The gradient of a weight, or None if it was accumulated into a float32 `weight.grad`."""
    return None if accumulate_weight_grads((weight_VC,), grad_NV, hidden_NC) else grad_NV.t() @ hidden_NC
