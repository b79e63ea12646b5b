"""Decode attention of a step on a CPU with few requests, each one contiguous run of the KV cache.

At short contexts such a step costs mostly the calls of PyTorch, so each layer makes as few as possible: a request's new
key and value are copied into the cache, then its query attends to views of it.

Axes: T tokens of the step, one per request; H query heads, K key-value heads, G query heads of one key-value head, S
tokens of the cache, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tunesmith.engine.batch.kv_cache import KVCache
from tunesmith.engine.core.span import Span
from tunesmith.model.forward.attention import AttentionOptions, attend_masked, get_layer_index

MAX_REQUESTS = 8
"""With more requests, `PagedAttentionPlan` makes fewer calls, since it attends for several at once."""


def has_single_runs(spans: Sequence[Span]) -> bool:
    """Whether `SingleRunPlan` can attend for these spans."""
    return len(spans) <= MAX_REQUESTS and all(len(span.runs) == 1 and span.stop - span.start == 1 for span in spans)


class SingleRunPlan:
    """The `AttentionPlan` of one step, over a head-major cache."""

    def __init__(self, cache: KVCache, spans: Sequence[Span]) -> None:
        self._cache = cache
        self._slots = [(span.runs[0].first * cache.block_size, span.stop) for span in spans]
        """The first token of each request in the cache, and the length of its context."""
        self._new_slots_T = torch.tensor([first + length - 1 for first, length in self._slots])

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        layer, (_, num_kv_heads, num_requests, head_size) = get_layer_index(module), key.shape
        keys_1KSD = self._cache.keys[layer].view(1, num_kv_heads, -1, head_size)
        values_1KSD = self._cache.values[layer].view(1, num_kv_heads, -1, head_size)
        keys_1KSD.index_copy_(2, self._new_slots_T, key)
        values_1KSD.index_copy_(2, self._new_slots_T, value)
        queries = query.transpose(1, 2).reshape(num_requests, 1, num_kv_heads, -1, head_size).unbind()
        outputs = []
        for query_1KGD, (first, length) in zip(queries, self._slots, strict=True):
            if options.sliding_window is not None and options.sliding_window < length:
                first, length = first + length - options.sliding_window, options.sliding_window
            output_1KGD = attend_masked(
                query_1KGD,
                keys_1KSD.narrow(2, first, length),
                values_1KSD.narrow(2, first, length),
                None,
                scaling=options.scaling,
                softcap=options.softcap,
            )
            outputs.append(output_1KGD)
        output_TKGD = outputs[0] if num_requests == 1 else torch.cat(outputs)
        return output_TKGD.reshape(1, num_requests, -1, head_size)
