"""Logprobs and entropies of tokens from hidden states, without materializing the logits of all positions.

Positions are processed in chunks. With gradients and several chunks, each chunk recomputes its logits in its backward.
Results are float32, or float64 in a float64 model. Greedy tokens (temperature 0) are scored at temperature 1. On a GPU
a chunk of 16-bit hidden states has one float32 copy of its logits, and their gradients overwrite it.

Axes: N positions, C hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tunesmith.model.forward.distribution import LogitAdjustment, has_truncation, truncate_logits
from tunesmith.model.forward.logits import compute_logits, get_logit_scaling, is_16bit_linear_head
from tunesmith.types import Distribution

CHUNK_TOKENS = 1024
"""Default positions per chunk on a CPU."""
CHUNK_BYTES = 600_000_000
"""Least default size of a chunk's float32 logits on other devices."""
CHUNK_FRACTION = 1 / 128
"""Default size of a chunk's logits as a fraction of the device's memory, if that is more: the gradient of the head's
weight is read and written once per chunk."""
CHUNK_STEP = 128
"""On other devices a chunk is a multiple of this, for the tiles of matrix products."""


def choose_chunk_tokens(model: PreTrainedModel) -> int:
    """Default number of positions per chunk."""
    if model.device.type == "cpu":
        return CHUNK_TOKENS
    num_bytes = CHUNK_BYTES
    if model.device.type == "cuda":
        num_bytes = max(num_bytes, int(CHUNK_FRACTION * torch.cuda.get_device_properties(model.device).total_memory))
    num_tokens = num_bytes // (4 * model.config.get_text_config().vocab_size)
    return max(CHUNK_STEP, num_tokens // CHUNK_STEP * CHUNK_STEP)


def compute_logprobs(
    model: PreTrainedModel,
    hidden_NC: Tensor,
    target_N: Tensor,
    distribution: Distribution,
    *,
    chunk_tokens: int,
    with_entropy: bool = False,
    adjustment: LogitAdjustment | None = None,
) -> tuple[Tensor, Tensor]:
    """Logprobs [N] of the targets and entropies [N] of the distributions; entropies take gradients if `with_entropy`.

    At most `chunk_tokens` positions have logits in memory at any time, in the backward too. An `adjustment` has the
    penalties and bans of all positions, which must fit into one chunk.
    """
    hiddens, targets = hidden_NC.split(chunk_tokens), target_N.split(chunk_tokens)
    assert adjustment is None or len(hiddens) == 1, "an adjustment belongs to one chunk"
    has_recomputation = len(hiddens) > 1 and torch.is_grad_enabled()
    scores = []
    for hidden, target in zip(hiddens, targets, strict=True):
        if has_recomputation:
            scores.append(
                checkpoint(_score_chunk, model, hidden, target, distribution, with_entropy, use_reentrant=False)
            )
        else:
            scores.append(_score_chunk(model, hidden, target, distribution, with_entropy, adjustment))
    logprobs, entropies = zip(*scores, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _score_chunk(
    model: PreTrainedModel,
    hidden_NC: Tensor,
    target_N: Tensor,
    distribution: Distribution,
    with_entropy: bool,
    adjustment: LogitAdjustment | None = None,
) -> tuple[Tensor, Tensor]:
    """`compute_logprobs` without chunks."""
    head = model.get_output_embeddings()
    is_plain = not (has_truncation(distribution) or distribution.logit_bias or adjustment)
    if is_plain and is_16bit_linear_head(head, hidden_NC):
        from tunesmith.model.kernels.logprob_kernels import (
            FusedLogprob,  # needs Triton, which is installed on CUDA machines only
        )

        scaling = (*get_logit_scaling(model), 1.0 / (distribution.temperature or 1.0))
        return FusedLogprob.apply(hidden_NC, head.weight, target_N, scaling, with_entropy)
    logits_NV = compute_logits(model, hidden_NC)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    logits_NV = truncate_logits(logits_NV, distribution, keep_ids_N=target_N, adjustment=adjustment)
    if adjustment is not None or has_truncation(distribution):
        logits_NV = logits_NV.clamp(min=torch.finfo(logits_NV.dtype).min / 4)
    logprobs_N, entropy_N = _LogprobAndEntropy.apply(logits_NV, target_N, with_entropy)
    return logprobs_N, entropy_N


class _LogprobAndEntropy(torch.autograd.Function):
    """Logprob of the target and entropy of each row of finite logits, in few passes over [N, V].

    With p = softmax(logits) and H its entropy: d logprob = onehot - p, d H = -p (log p + H).
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor]:
        shifted_NV = logits_NV - logits_NV.amax(dim=1, keepdim=True)
        exp_NV = shifted_NV.exp()
        total_N = exp_NV.sum(dim=1)
        log_total_N = total_N.log()
        logprobs_N = shifted_NV.gather(1, target_N[:, None])[:, 0] - log_total_N
        entropy_N = log_total_N - torch.linalg.vecdot(exp_NV, shifted_NV) / total_N
        ctx.with_entropy = with_entropy
        ctx.save_for_backward(exp_NV, total_N, target_N, *((shifted_NV, entropy_N) if with_entropy else ()))
        if not with_entropy:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_N: Tensor, grad_entropy_N: Tensor) -> tuple[Tensor, None, None]:
        exp_NV, total_N, target_N, *rest = ctx.saved_tensors
        grad_NV = exp_NV * (-grad_logprobs_N / total_N)[:, None]
        grad_NV.scatter_add_(1, target_N[:, None], grad_logprobs_N[:, None])
        if ctx.with_entropy:
            shifted_NV, entropy_N = rest
            surprise_NV = shifted_NV + (entropy_N - total_N.log())[:, None]
            grad_NV.addcmul_(exp_NV * (-grad_entropy_N / total_N)[:, None], surprise_NV)
        return grad_NV, None, None
