"""Tree attention on a CPU: the row is split into segments, each of which attends to its path from the root.

A segment is a chain of nodes without a branch. Its queries attend to all keys of the path with a causal mask within the
segment. A long chain below another segment is split, so that few of the computed scores are masked. A chain that starts
at a root is one causal call. In a trie of 5 nodes with branches of 3 and 200 nodes the segments are 0-5, 5-8, 8-136 and
136-208; the path of the last one is 0-5, 8-136, 136-208.

Axes: N tokens of a segment, P tokens of its path (the segment included), H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tunesmith.experience.samples import Trie
from tunesmith.model.forward.attention import AttentionOptions, attend_masked
from tunesmith.model.forward.recurrence import Segment

MAX_CHILD_SEGMENT_TOKENS = 128
"""Longest segment that has a parent segment."""


def split_segments(trie: Trie, max_child_tokens: int | None = None) -> list[Segment]:
    """Chains of nodes without a branch, in depth-first order; they partition the row. Those with a parent have at most
    `max_child_tokens`, by default `MAX_CHILD_SEGMENT_TOKENS`."""
    max_child_tokens = max_child_tokens or MAX_CHILD_SEGMENT_TOKENS
    is_single_child_T = (np.diff(trie.depth_T) == 1) & (np.diff(trie.subtree_end_T) == 0)
    starts = [0, *(np.flatnonzero(~is_single_child_T) + 1).tolist()]
    segments: list[Segment] = []
    path: list[int] = []
    for run_start, run_end in zip(starts, [*starts[1:], trie.num_tokens], strict=True):
        depth = trie.depth_T[run_start]
        while path and trie.depth_T[segments[path[-1]].start] >= depth:
            path.pop()
        length = max_child_tokens if path else run_end - run_start
        for start in range(run_start, run_end, length):
            parent = path[-1] if path else None
            path.append(len(segments))
            segments.append(Segment(start=start, end=min(start + length, run_end), parent=parent))
    return segments


class SegmentAttention:
    """Attention over the segments of one row; masks are cached across layers."""

    def __init__(self, trie: Trie) -> None:
        self.segments = split_segments(trie)
        self._masks: dict[tuple[int, int, int | None, torch.dtype], Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Take query [1, H, T, D], key and value [1, K, T, D]; return [1, H, T, D]."""
        lengths = [segment.end - segment.start for segment in self.segments]
        pieces = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
        paths: list[tuple[Tensor, Tensor]] = []
        outputs = []
        for segment, (query_N, key_P, value_P) in zip(self.segments, pieces, strict=True):
            if segment.parent is not None:
                path_key, path_value = paths[segment.parent]
                key_P, value_P = torch.cat([path_key, key_P], 2), torch.cat([path_value, value_P], 2)
            paths.append((key_P, value_P))
            outputs.append(self._attend_segment(query_N, key_P, value_P, options))
        return torch.cat(outputs, 2)

    def _attend_segment(self, query_N: Tensor, key_P: Tensor, value_P: Tensor, options: AttentionOptions) -> Tensor:
        num_tokens, num_keys, window = query_N.shape[2], key_P.shape[2], options.sliding_window
        if window is not None and num_keys > num_tokens + window - 1:
            num_keys = num_tokens + window - 1
            key_P, value_P = key_P[:, :, -num_keys:], value_P[:, :, -num_keys:]
        if window is not None and num_keys <= window:
            window = None
        if options.softcap is not None or options.sinks is not None:
            mask_NP = self._build_mask(num_tokens, num_keys, window, torch.bool)
            return attend_masked(query_N, key_P, value_P, mask_NP, options)
        is_path = window is None and num_keys == num_tokens
        return scaled_dot_product_attention(
            query_N,
            key_P,
            value_P,
            attn_mask=None if is_path else self._build_mask(num_tokens, num_keys, window, query_N.dtype),
            is_causal=is_path,
            scale=options.scaling,
            enable_gqa=query_N.shape[1] != key_P.shape[1],
        )

    def _build_mask(self, num_tokens: int, num_keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Mask [N, P] of a segment whose last token attends to the last key; additive unless `dtype` is bool."""
        cache_key = (num_tokens, num_keys, window, dtype)
        if cache_key not in self._masks:
            distance_NP = torch.arange(num_keys - num_tokens, num_keys)[:, None] - torch.arange(num_keys)[None]
            is_visible_NP = distance_NP >= 0
            if window is not None:
                is_visible_NP &= distance_NP < window
            if dtype != torch.bool:
                is_visible_NP = torch.zeros_like(is_visible_NP, dtype=dtype).masked_fill_(~is_visible_NP, -torch.inf)
            self._masks[cache_key] = is_visible_NP
        return self._masks[cache_key]
