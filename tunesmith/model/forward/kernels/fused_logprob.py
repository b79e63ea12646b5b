"""Fused head and log-softmax on a GPU: hidden states -> logprob and entropy per token, and the backward.

The logits of a chunk exist once, in float32. One kernel reads them; in the backward another overwrites them with their
gradients.

Axes: N positions, C hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tunesmith.model.forward.kernels.token_logprob import compute_logit_grads, compute_token_logprobs


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
        grad_weight_VC = _compute_weight_grad(ctx.weight, grad_NV, hidden_NC) if needs_weight else None
        return grad_hidden_NC, grad_weight_VC, None, None, None


def _compute_weight_grad(weight_VC: Tensor, grad_NV: Tensor, hidden_NC: Tensor) -> Tensor | None:
    """The gradient of the head's weight, or None if it was accumulated into a float32 `weight.grad`."""
    if not weight_VC.is_leaf or weight_VC.grad_dtype != torch.float32:
        return grad_NV.t() @ hidden_NC
    if weight_VC.grad is None:
        weight_VC.grad = torch.mm(grad_NV.t(), hidden_NC, out_dtype=torch.float32)
    else:
        torch.addmm(weight_VC.grad, grad_NV.t(), hidden_NC, out_dtype=torch.float32, out=weight_VC.grad)
    return None
