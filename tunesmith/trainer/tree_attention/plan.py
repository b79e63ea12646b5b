"""The attention plan of a packed row: each token attends to itself and its ancestors in the row's trie.

Node q attends to node k if and only if k <= q < subtree_end[k]; a sliding window counts in depth. On a CPU attention
runs per segment (`cpu.py`). On a GPU one kernel evaluates the same rule, over tiles that are scheduled when the row is
built (`tile_schedule.py`); float64 uses a dense mask. With `model.numerics=exact` attention is the sampler's kernel;
gradients are those of the tiles.

Axes: T tokens of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from tunesmith.experience.samples import Trie
from tunesmith.model.arrays import copy_to_device
from tunesmith.model.custom_op import define_op
from tunesmith.model.forward.attention import AttentionOptions, attend_masked
from tunesmith.model.forward.recurrence import SegmentTable
from tunesmith.model.memory import find_head_size, list_layer_configs
from tunesmith.model.torch_modes import is_exact
from tunesmith.trainer.tree_attention.cpu import SegmentAttention, split_segments
from tunesmith.trainer.tree_attention.tile_schedule import (
    PADDING,
    TILINGS,
    build_table,
    choose_tiling,
    compute_table_size,
    pad_trie,
)


def _build_output(query_1HTD: Tensor, *_rest: object) -> Tensor:
    _, num_heads, num_tokens, size = query_1HTD.shape
    return query_1HTD.new_empty((1, num_tokens, num_heads, size))


exact_attention = define_op(
    "exact_attention(Tensor query, Tensor key, Tensor value, Tensor paths, Tensor spans, Tensor tiles, Tensor table, "
    "int tiling, int window, float scaling, float softcap) -> Tensor",
    build=_build_output,
)
"""Stands for `attend_exactly` in traced layers, which fusion replaces."""


class TreePlan:
    """The `AttentionPlan` of one row. On a GPU the row may be padded beyond the trie, to a multiple of `PADDING`."""

    def __init__(
        self,
        trie: Trie,
        device: torch.device,
        *,
        tilings: Sequence[int] = (),
        windows: Sequence[int | None] = (),
        heads: tuple[int, int] | None = None,
    ) -> None:
        """`tilings`, indices in `TILINGS`, and `windows` are the model's (`describe_attention`); others are built on
        demand. Given `heads` (`describe_heads`), attention has the sampler's order of additions."""
        self._trie = trie
        self._device = device
        self._max_depth = int(trie.depth_T.max(initial=0))
        self._segments = SegmentAttention(trie) if device.type == "cpu" else None
        self._tables: dict[tuple[int | None, int], Tensor] = {}
        self._num_groups = None if heads is None else heads[0]
        self._spans: tuple[Tensor, Tensor, Tensor] | None = None
        if device.type != "cpu":
            self._tables = {(w, tiling): self._build_table(w, tiling) for w in windows for tiling in tilings}
        if heads is not None:
            from tunesmith.trainer.tree_attention.kernels.exact_attention import build_spans  # needs Triton

            self._spans = build_spans(pad_trie(trie), heads, device)

    @cached_property
    def segments(self) -> SegmentTable:
        """Built when a recurrent layer reads it."""
        num_tokens = self._trie.num_tokens
        num_added = 0 if self._device.type == "cpu" else -num_tokens % PADDING
        return SegmentTable(split_segments(self._trie), self._device, num_tokens=num_tokens + num_added)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """See `AttentionPlan.attend`."""
        if self._segments is not None:
            num_tokens, num_nodes = query.shape[2], self._trie.num_tokens
            assert num_tokens == num_nodes, f"the plan has {num_nodes} tokens, the query {num_tokens}"
            if options.sliding_window is not None and options.sliding_window > self._max_depth:
                options = replace(options, sliding_window=None)
            return self._segments.attend(query, key, value, options).transpose(1, 2).contiguous()
        if query.dtype == torch.float64:
            trie = self._trie if query.shape[2] == self._trie.num_tokens else pad_trie(self._trie)
            mask = build_mask(trie, options.sliding_window).to(self._device)
            output = attend_masked(query, key, value, mask, options)
            return output.transpose(1, 2).contiguous()
        num_tokens = query.shape[2]
        if num_added := -num_tokens % PADDING:
            query, key, value = (functional.pad(x, (0, 0, 0, num_added)) for x in (query, key, value))
        output = self._attend_tiles(query, key, value, options)
        return output[:, :num_tokens] if num_added else output

    def _attend_tiles(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        from tunesmith.trainer.tree_attention.kernels.tree_attention import (
            tree_attention,  # needs Triton, which is on CUDA machines only
        )

        window = options.sliding_window
        table, tiling = self._find_table(query, window)
        numbers = window or 0, options.get_scaling(query.shape[-1]), options.softcap or 0.0
        if self._spans is None:
            return tree_attention(query, key, value, table, tiling, *numbers, options.sinks)[0]
        from tunesmith.trainer.tree_attention.kernels.exact_attention import attend_exactly

        assert query.shape[1] // key.shape[1] == self._num_groups, "tiles are those of another number of heads"
        attend = exact_attention if torch.compiler.is_compiling() else attend_exactly
        return attend(query, key, value, *self._spans, table, tiling, *numbers)

    def _find_table(self, query: Tensor, window: int | None) -> tuple[Tensor, int]:
        tiling = find_tiling(query.shape[-1], query.dtype)
        if (window, tiling) not in self._tables:
            self._tables[window, tiling] = self._build_table(window, tiling)
        return self._tables[window, tiling], tiling

    def reserve_tables(self) -> None:
        """Reallocate each table at the maximum size for a row of this length.

        A CUDA graph reads the memory that it was captured with, and tables of later rows may be longer.
        """
        for (window, tiling), table in self._tables.items():
            reserved = table.new_zeros(compute_table_size(self._trie.num_tokens, TILINGS[tiling]))
            reserved[: len(table)] = table
            self._tables[window, tiling] = reserved

    @property
    def sizes(self) -> tuple[torch.Size, ...]:
        """Of tensors that plans must share, beside their length, to share a CUDA graph."""
        return tuple(each.shape for each in self._spans or ())

    def copy_tables(self, other: TreePlan) -> None:
        """Copy the tables of a plan of the same length and sizes into the memory of this plan's tables."""
        for table_key, table in other._tables.items():
            self._tables[table_key][: len(table)].copy_(table)
        for own, new in zip(self._spans or (), other._spans or (), strict=True):
            own.copy_(new)

    def _build_table(self, window: int | None, tiling: int) -> Tensor:
        # built on the host while the device computes the row before
        return copy_to_device(build_table(pad_trie(self._trie), window, TILINGS[tiling]), self._device)


def describe_attention(model: PreTrainedModel) -> dict[str, Any]:
    """Tilings and windows of the model's layers, as keyword arguments of `TreePlan`."""
    if model.device.type == "cpu":
        return {}
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    sizes = map(find_head_size, list_layer_configs(config))
    return {
        "tilings": list(dict.fromkeys(find_tiling(size, model.dtype) for size in sizes)),
        "windows": (None,) if window is None else (None, window),
    }


def find_tiling(head_size: int, dtype: torch.dtype) -> int:
    """`choose_tiling` for the current GPU."""
    is_wide = torch.finfo(dtype).bits >= 32
    return choose_tiling(head_size, is_wide=is_wide, is_hopper=torch.cuda.get_device_capability()[0] == 9)


def describe_heads(model: PreTrainedModel) -> tuple[int, int] | None:
    """Query heads of a key-value head, and their size, with exact numerics."""
    config = model.config.get_text_config()
    return (config.num_attention_heads // config.num_key_value_heads, find_head_size(config)) if is_exact() else None


def build_mask(trie: Trie, window: int | None) -> Tensor:
    """Dense mask [T, T]: True where query q (row) attends to key k (column)."""
    node_T = torch.arange(trie.num_tokens)
    depth_T, subtree_end_T = torch.from_numpy(trie.depth_T), torch.from_numpy(trie.subtree_end_T)
    is_visible = (node_T[None] <= node_T[:, None]) & (node_T[:, None] < subtree_end_T[None])
    return is_visible if window is None else is_visible & (depth_T[:, None] - depth_T[None] < window)
