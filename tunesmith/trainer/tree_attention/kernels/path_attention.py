"""Causal attention of each path of a row with one cuDNN call per path, the fastest choice for long paths.

Axes: T tokens of the row, H query heads, K key-value heads, D head size, L tokens of a path.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tunesmith.trainer.tree_attention.kernels.tree_attention import make_grad

aten = torch.ops.aten


@torch.library.custom_op("tunesmith::path_attention", mutates_args=())
def path_attention(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Take query [1, H, T, D], key and value [1, K, T, D]; return the output [1, T, H, D] and log-sums [H * T].

    `starts` (on the CPU) holds the start of each path; the last path ends with the row. Log-sums are stored path by
    path.
    """
    num_heads, num_tokens, size = query.shape[1:]
    output = query.new_empty((1, num_tokens, num_heads, size))
    log_sums = torch.empty(num_heads * num_tokens, dtype=torch.float32, device=query.device)
    for tokens, sums in _iter_paths(starts, num_tokens, num_heads):
        path = [x[:, :, tokens] for x in (query, key, value)]
        path_output, path_sums, *_ = aten._scaled_dot_product_cudnn_attention(
            *path, None, True, 0.0, True, False, scale=scaling
        )
        output[:, tokens] = path_output.transpose(1, 2)
        log_sums[sums] = path_sums.reshape(-1)
    return output, log_sums


@path_attention.register_fake
def _(query: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    num_heads, num_tokens, size = query.shape[1:]
    output = query.new_empty((1, num_tokens, num_heads, size))
    return output, query.new_empty(num_heads * num_tokens, dtype=torch.float32)


@torch.library.custom_op("tunesmith::path_attention_backward", mutates_args=())
def path_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sums: Tensor,
    starts: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from that of the output [1, T, H, D]; stored token-major, see `make_grad`."""
    grads = make_grad(query), make_grad(key), make_grad(value)
    unused = torch.zeros((), dtype=torch.int64, device=query.device)
    for tokens, sums in _iter_paths(starts, query.shape[2], query.shape[1]):
        path = [x[:, :, tokens] for x in (query, key, value)]
        length = path[0].shape[2]
        path_grads = aten._scaled_dot_product_cudnn_attention_backward(
            grad[:, tokens].transpose(1, 2), *path, output[:, tokens].transpose(1, 2),
            log_sums[sums].view(1, -1, length, 1), unused, unused, None, None, None, length, length, 0.0, True,
            scale=scaling,
        )  # fmt: skip
        for whole, part in zip(grads, path_grads, strict=True):
            whole[:, :, tokens] = part
    return grads


@path_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *options: object) -> tuple[Tensor, Tensor, Tensor]:
    return make_grad(query), make_grad(key), make_grad(value)


def _iter_paths(starts: Tensor, num_tokens: int, num_heads: int) -> Iterator[tuple[slice, slice]]:
    """The slices of each path in the tokens and in the log-sums."""
    bounds = [*starts.tolist(), num_tokens]
    for start, end in pairwise(bounds):
        yield slice(start, end), slice(num_heads * start, num_heads * end)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, starts, ctx.scaling = inputs
    ctx.save_for_backward(query, key, value, *output, starts)
    ctx.set_materialize_grads(False)


def _run_backward(ctx: Any, grad: Tensor, grad_log_sums: Tensor | None) -> tuple[Tensor | None, ...]:
    return *path_attention_backward(grad, *ctx.saved_tensors, ctx.scaling), None, None


path_attention.register_autograd(_run_backward, setup_context=_keep_inputs)
