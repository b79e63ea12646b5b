"""From hidden states to the scores of tokens and back, head included, on a GPU.

One copy of a chunk's logits is made, in float32; one kernel reads it, and one kernel writes the gradients over it.

Axes: N positions, C hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tunesmith.model.forward.kernels.token_score import grade_logits, score_tokens


class HeadScore(torch.autograd.Function):
    """Logprobs [N] of the targets and entropies [N], the latter differentiable where asked for.

    A weight whose gradient is wider than itself (`grad_dtype`) gets it here, added in float32 where it lies, so that
    the sum over chunks is neither rounded nor copied; its gradient can then be had from `backward` only.
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
        logprobs_N, entropy_N, log_sums_N = score_tokens(logits_NV, target_N, **ctx.scales)
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
        grad_NV = grade_logits(
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
        grad_weight_VC = _differentiate_weight(ctx.weight, grad_NV, hidden_NC) if needs_weight else None
        return grad_hidden_NC, grad_weight_VC, None, None, None


def _differentiate_weight(weight_VC: Tensor, grad_NV: Tensor, hidden_NC: Tensor) -> Tensor | None:
    """The gradient of the head's weight, or None where it was added to a wider one."""
    if not weight_VC.is_leaf or weight_VC.grad_dtype != torch.float32:
        return grad_NV.t() @ hidden_NC
    if weight_VC.grad is None:
        weight_VC.grad = torch.mm(grad_NV.t(), hidden_NC, out_dtype=torch.float32)
    else:
        torch.addmm(weight_VC.grad, grad_NV.t(), hidden_NC, out_dtype=torch.float32, out=weight_VC.grad)
    return None
