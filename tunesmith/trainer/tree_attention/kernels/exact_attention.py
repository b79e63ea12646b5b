"""Tree attention with the sampler's order of additions (`model.numerics=exact`); its backward is `tree_attention`'s.

Each chain of the trie is a span whose row of the block table lists the places of its path, so a block holds one token.

Axes: T tokens of the row, S spans, P tokens of the longest path, I tiles, H query heads, K key-value heads, D head
size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tunesmith.experience.samples import Trie
from tunesmith.model.kernels.span_attention import attend_spans, get_tile_tokens
from tunesmith.trainer.tree_attention.cpu import split_segments
from tunesmith.trainer.tree_attention.kernels.tree_attention import tree_attention_backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """The chains of a trie as `attend_spans` takes them."""

    num_tokens: int
    """Of the trie; the row may be longer."""
    path_table_SP: Tensor
    spans_3S: Tensor
    tiles_2I: Tensor


def build_spans(trie: Trie, num_groups: int, device: torch.device) -> Spans:
    """`num_groups` are the query heads of a key-value head."""
    chains = split_segments(trie, max_child_tokens=max(trie.num_tokens, 1))
    longest = int(trie.depth_T.max(initial=-1)) + 1
    table_SP, spans_3S = np.zeros((len(chains), longest), np.int32), np.zeros((3, len(chains)), np.int32)
    for index, chain in enumerate(chains):
        depth, length = int(trie.depth_T[chain.start]), chain.end - chain.start
        if chain.parent is not None:
            table_SP[index, :depth] = table_SP[chain.parent, :depth]
        table_SP[index, depth : depth + length] = np.arange(chain.start, chain.end)
        spans_3S[:, index] = chain.start, depth, depth + length
    step = get_tile_tokens(num_groups)
    tiles = [
        (index, offset) for index, chain in enumerate(chains) for offset in range(0, chain.end - chain.start, step)
    ]
    arrays = (table_SP, spans_3S, np.array(tiles, np.int32).reshape(-1, 2).T.copy())
    table, spans, tiles_2I = (torch.from_numpy(each).to(device) for each in arrays)
    return Spans(num_tokens=trie.num_tokens, path_table_SP=table, spans_3S=spans, tiles_2I=tiles_2I)


class ExactAttention(torch.autograd.Function):
    """Take query [1, H, T, D], key and value [1, K, T, D]; return [1, T, H, D]. Padding tokens attend to nothing.

    `table`, `steps`, `window`, `scaling` and `softcap` are those of `tree_attention`.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: Spans, table: Tensor, *options: Any
    ) -> Tensor:
        _, window, scaling, softcap = options
        log_sums_HT = torch.zeros(query.shape[1:3], dtype=torch.float32, device=query.device)
        keys, values = (each[0].transpose(0, 1).contiguous().unsqueeze(2) for each in (key, value))  # [T, K, 1, D]
        output = attend_spans(
            query if query.stride(-1) == 1 else query.contiguous(), keys, values, spans.path_table_SP, spans.spans_3S,
            spans.tiles_2I, scaling=scaling, sliding_window=window, softcap=softcap, log_sums_HT=log_sums_HT,
        )  # fmt: skip
        output[:, spans.num_tokens :] = 0.0
        ctx.save_for_backward(query, key, value, output, log_sums_HT, table)
        ctx.options = options
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *tree_attention_backward(grad, *ctx.saved_tensors, *ctx.options), *(None,) * 6
