"""Tree attention forward and backward as custom operators, which torch.compile does not trace into.

Axes: T tokens of the row (a multiple of the tile), H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from tunesmith.errors import TrainingError
from tunesmith.trainer.tree_attention.kernels.tree_kernels import (
    attention_forward,
    backward_key_value,
    backward_query,
    reduce_key_value_grads,
)
from tunesmith.trainer.tree_attention.tile_schedule import TILINGS, Tile, count_partial_sums


def _get_options(query: Tensor, key: Tensor, tile: Tile, *, window: int, softcap: float) -> dict[str, Any]:
    """What all kernels of a call have."""
    return {
        "GROUPS": query.shape[1] // key.shape[1], "SIZE": query.shape[3],
        "SIZE_PAD": max(16, triton.next_power_of_2(query.shape[3])), "HAS_SOFTCAP": softcap > 0,
        "HAS_WINDOW": window > 0, "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip


@torch.library.custom_op("tunesmith::tree_attention", mutates_args=())
def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, tiling: int, window: int, scaling: float, softcap: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Take query [1, H, T, D], key and value [1, K, T, D]; return the output [1, T, H, D] and its log-sums [H, T].

    `table` is `tile_schedule.build_table` for `TILINGS[tiling]`; `window` and `softcap` 0 mean none; `sinks` [H].
    """
    query, key, value = (_align(x) for x in (query, key, value))
    tile, (num_heads, num_tokens, size) = TILINGS[tiling].forward, query.shape[1:]
    if num_heads * num_tokens * size >= 2**31:  # kernels have offsets of 32 bits
        raise TrainingError(
            f"a row of {num_tokens:,} tokens is too long for {num_heads} heads of size {size}: lower "
            "trainer.max_tokens_per_row, or model.max_model_len if one rollout is as long"
        )
    output = query.new_empty((1, num_tokens, num_heads, size))
    log_sums = torch.empty((num_heads, num_tokens), dtype=torch.float32, device=query.device)
    attention_forward[(num_tokens // tile.rows, num_heads)](
        query, key, value, output, log_sums, log_sums if sinks is None else sinks, table, scaling, softcap, window,
        num_tokens,
        query.stride(2), query.stride(1), key.stride(2), key.stride(1), value.stride(2), value.stride(1),
        HEADS=num_heads, TILE_M=tile.rows, TILE_N=tile.steps, HAS_SINKS=sinks is not None,
        **_get_options(query, key, tile, window=window, softcap=softcap),
    )  # fmt: skip
    return output, log_sums


@tree_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    num_heads, num_tokens, size = query.shape[1:]
    output = query.new_empty((1, num_tokens, num_heads, size))
    return output, query.new_empty((num_heads, num_tokens), dtype=torch.float32)


@torch.library.custom_op("tunesmith::tree_attention_backward", mutates_args=())
def tree_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sums: Tensor, table: Tensor,
    tiling: int, window: int, scaling: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value from that of the output [1, T, H, D]; stored token-major, see `make_grad`."""
    grad, query, key, value = (_align(x) for x in (grad, query, key, value))
    (num_heads, num_tokens, size), num_kv_heads = query.shape[1:], key.shape[1]
    rows, keys = TILINGS[tiling].backward_query, TILINGS[tiling].backward_key_value
    deltas = torch.empty_like(log_sums)
    grad_query, grad_key, grad_value = (make_grad(x) for x in (query, key, value))
    shared = (
        scaling, softcap, window, num_tokens, query.stride(2), query.stride(1), key.stride(2), key.stride(1),
        value.stride(2), value.stride(1), grad.stride(1), grad.stride(2),
    )  # fmt: skip
    backward_query[(num_tokens // rows.rows, num_heads)](
        query, key, value, output, grad, log_sums, deltas, grad_query, table, *shared,
        HEADS=num_heads, TILE_M=rows.rows, TILE_N=rows.steps,
        **_get_options(query, key, rows, window=window, softcap=softcap),
    )  # fmt: skip
    num_keys, options = num_tokens // keys.rows, _get_options(query, key, keys, window=window, softcap=softcap)
    num_sums = count_partial_sums(num_keys)
    sums = torch.empty((num_sums, num_kv_heads, 2, keys.rows, size), dtype=torch.float32, device=query.device)
    backward_key_value[(num_keys + num_sums, num_kv_heads)](
        query, key, value, grad, log_sums, deltas, grad_key, grad_value, sums, table, *shared,
        KV_HEADS=num_kv_heads, TILE_M=keys.steps, TILE_N=keys.rows, QUERY_ROWS=rows.rows, **options,
    )  # fmt: skip
    reduce_key_value_grads[(num_sums, num_kv_heads)](
        sums, grad_key, grad_value, table, scaling, num_tokens, num_sums,
        KV_HEADS=num_kv_heads, SIZE=size, SIZE_PAD=options["SIZE_PAD"], TILE_N=keys.rows, QUERY_ROWS=rows.rows,
    )  # fmt: skip
    return grad_query, grad_key, grad_value


@tree_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *options: object) -> tuple[Tensor, Tensor, Tensor]:
    return make_grad(query), make_grad(key), make_grad(value)


def _align(x: Tensor) -> Tensor:
    """The kernels need a contiguous last axis."""
    return x if x.stride(-1) == 1 else x.contiguous()


def make_grad(x: Tensor) -> Tensor:
    """Empty tensor of shape [1, heads, T, D] with memory layout [T, heads, D]."""
    num_heads, num_tokens, size = x.shape[1:]
    return x.new_empty((1, num_tokens, num_heads, size)).transpose(1, 2)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, table, *options, sinks = inputs
    ctx.save_for_backward(query, key, value, *output, table, sinks)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _run_backward(ctx: Any, grad: Tensor, grad_log_sums: Tensor | None) -> tuple[Tensor | None, ...]:
    *saved, sinks = ctx.saved_tensors
    grads = tree_attention_backward(grad, *saved, *ctx.options)
    if sinks is not None:  # a key of value 0: the gradient of its score is its weight times minus the mean slope
        output, log_sums_HT = saved[3:5]
        slopes_HT = (grad[0].float() * output[0].float()).sum(dim=-1).t()
        weights_HT = torch.exp2(sinks[:, None].float() / math.log(2) - log_sums_HT)
        sinks = -(weights_HT * slopes_HT).sum(dim=1).to(sinks.dtype)
    return *grads, None, None, None, None, None, sinks


tree_attention.register_autograd(_run_backward, setup_context=_keep_inputs)
