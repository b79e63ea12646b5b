"""How the tokens of a packed row attend: each to itself and its ancestors in the row's trie.

Node q sees node k exactly when k <= q < subtree_end[k]; a sliding window counts in depth. A CPU goes segment by segment
(`segments.py`). On a GPU one flex-attention kernel reads the same rule, with the blocks it may skip worked out from the
trie; what that kernel does not take (short rows, float64, tiny heads) goes through a dense mask. Masks are made once
per row and used by every layer.

Axes: T tokens of the row, B blocks of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tunesmith.experience.trie import Trie
from tunesmith.model.attention import attend_masked
from tunesmith.trainer.segments import Scoring, SegmentAttention

BLOCK_TOKENS = 128
"""Edge of a block of flex attention."""
FLEX_MIN_TOKENS = 1024
"""Shorter rows are faster under a dense mask."""
FLEX_MIN_HEAD = 16
"""Smallest head size of flex attention's kernels."""

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query node, key node) -> whether the query sees the key."""


class TreePlan:
    """The `AttentionPlan` of one row."""

    def __init__(self, trie: Trie, device: torch.device) -> None:
        self._trie = trie
        self._max_depth = int(trie.depth_T.max(initial=0))
        self._segments = SegmentAttention(trie) if device.type == "cpu" else None
        self._depth_T = torch.from_numpy(trie.depth_T).to(device)
        self._subtree_end_T = torch.from_numpy(trie.subtree_end_T).to(device)
        self._dense_masks: dict[int | None, Tensor] = {}
        self._block_masks: dict[int | None, BlockMask] = {}

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """See `AttentionPlan.attend`."""
        num_tokens = query.shape[2]
        assert num_tokens == self._trie.num_tokens, f"this plan is for {self._trie.num_tokens} tokens, not {num_tokens}"
        window = None if sliding_window is None or sliding_window > self._max_depth else sliding_window
        if self._segments is not None:
            scoring = Scoring(scaling=scaling, window=window, softcap=softcap)
            output = self._segments.attend(query, key, value, scoring)
        elif num_tokens < FLEX_MIN_TOKENS or query.shape[-1] < FLEX_MIN_HEAD or query.dtype == torch.float64:
            output = attend_masked(query, key, value, self._get_dense_mask(window), scaling=scaling, softcap=softcap)
        else:
            output = compile_flex_attention()(
                query,
                key,
                value,
                score_mod=None if softcap is None else build_softcap(softcap, query.device),
                block_mask=self._get_block_mask(window),
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        return output.transpose(1, 2)

    def _get_dense_mask(self, window: int | None) -> Tensor:
        if window not in self._dense_masks:
            node_T = torch.arange(self._trie.num_tokens, device=self._depth_T.device)
            rule = build_rule(self._depth_T, self._subtree_end_T, window)
            self._dense_masks[window] = rule(node_T, node_T, node_T[:, None], node_T[None])
        return self._dense_masks[window]

    def _get_block_mask(self, window: int | None) -> BlockMask:
        if window not in self._block_masks:
            rule = build_rule(self._depth_T, self._subtree_end_T, window)
            self._block_masks[window] = build_block_mask(self._trie, rule, window, self._depth_T.device)
        return self._block_masks[window]


@lru_cache
def compile_flex_attention() -> Callable[..., Tensor]:
    """The kernel, compiled once for every length."""
    return torch.compile(flex_attention, dynamic=True)


def build_rule(depth_T: Tensor, subtree_end_T: Tensor, window: int | None) -> Rule:
    """Which node sees which, as flex attention asks for it."""

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_seen = (key <= query) & (query < subtree_end_T[key])
        return is_seen if window is None else is_seen & (depth_T[query] - depth_T[key] < window)

    return sees


@lru_cache
def build_softcap(cap: float, device: torch.device) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Soft capping of attention scores; one function per cap, so that the kernel is compiled once."""
    cap_tensor = torch.tensor(cap, device=device)  # a float would become symbolic, which the kernel's backward refuses

    def softcap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap_tensor * torch.tanh(score / cap_tensor)

    return softcap


def find_blocks(trie: Trie, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Which blocks [B, B] of (queries, keys) hold a pair that is seen, and which of them hold only such pairs."""
    num_tokens, size = trie.num_tokens, BLOCK_TOKENS
    first_B = np.arange(0, num_tokens, size)
    last_B = np.minimum(first_B + size, num_tokens) - 1
    is_earlier_BB = first_B[None] < first_B[:, None]
    is_seen_BB = is_earlier_BB & (np.maximum.reduceat(trie.subtree_end_T, first_B)[None] > first_B[:, None])
    is_full_BB = is_earlier_BB & (np.minimum.reduceat(trie.subtree_end_T, first_B)[None] > last_B[:, None])
    is_full_BB &= (last_B - first_B == size - 1)[:, None]
    if window is not None:
        least_depth_B = np.minimum.reduceat(trie.depth_T, first_B)
        most_depth_B = np.maximum.reduceat(trie.depth_T, first_B)
        is_seen_BB &= least_depth_B[:, None] - most_depth_B[None] < window
        is_full_BB &= most_depth_B[:, None] - least_depth_B[None] < window
    return is_seen_BB | np.eye(len(first_B), dtype=bool), is_full_BB


def build_block_mask(trie: Trie, rule: Rule, window: int | None, device: torch.device) -> BlockMask:
    """The row's block mask, worked out from the trie: nothing of size [T, T] is made."""
    is_seen_BB, is_full_BB = find_blocks(trie, window)

    def list_blocks(is_listed_BB: np.ndarray) -> tuple[Tensor, Tensor]:
        order_BB = np.argsort(~is_listed_BB, axis=1, kind="stable")
        counts = torch.from_numpy(is_listed_BB.sum(axis=1)).to(device, torch.int32)
        return counts[None, None], torch.from_numpy(order_BB).to(device, torch.int32)[None, None]

    return BlockMask.from_kv_blocks(
        *list_blocks(is_seen_BB & ~is_full_BB),
        *list_blocks(is_full_BB),
        BLOCK_SIZE=BLOCK_TOKENS,
        mask_mod=rule,
        seq_lengths=(trie.num_tokens, trie.num_tokens),
    )
