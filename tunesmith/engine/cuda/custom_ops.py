"""Paged attention as custom torch operators: schemas and fake implementations.

`engine.cuda.kernels` registers the CUDA implementations. The schemas are separate from them so that layers can be
traced and fused on a machine without CUDA.

Axes: R requests, T tokens, I tiles, H query heads, K key-value heads, D head size, P KV-cache blocks, Z block size.
"""

from __future__ import annotations

from torch import Tensor

from tunesmith.model.custom_op import define_op

_KV_ARGUMENTS = "Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values"
_SCORE_ARGUMENTS = "float scaling, int sliding_window, float softcap, Tensor? sinks"


def _build_output(query_1HTD: Tensor, *_rest: object) -> Tensor:
    _, num_heads, num_tokens, size = query_1HTD.shape
    return query_1HTD.new_empty((1, num_tokens, num_heads, size))


paged_decode = define_op(
    f"paged_decode({_KV_ARGUMENTS}, Tensor block_table, Tensor positions, Tensor items, Tensor parts, "
    f"{_SCORE_ARGUMENTS}) -> Tensor",
    build=_build_output,
)
"""Write each request's new key and value [1, K, R, D] at its position and attend up to it; returns [1, R, H, D].

Takes query [1, H, R, D], the layer's KV-cache blocks [P, K, Z, D], the block table [R, columns] (int32), positions [R],
and items and parts of a `DecodeWork`. The last axis of query, key and value has stride 1; `sliding_window` 0 and
`softcap` 0 mean none; `sinks` are those of `AttentionOptions`.
"""
paged_prefill = define_op(
    f"paged_prefill({_KV_ARGUMENTS}, Tensor slot_mapping, Tensor block_table, Tensor spans, Tensor tiles, "
    f"{_SCORE_ARGUMENTS}) -> Tensor",
    build=_build_output,
)
"""Write the new keys and values [1, K, T, D] and attend over each token's own context; returns [1, T, H, D].

`slot_mapping` [T] is the token's block times the block size plus its offset in the block. `spans` [3, R] (int32) holds
for each request the row index of its first new token, that token's position, and the position after its last token.
`tiles` [2, I] (int32) holds for each tile its request and the index of its first token among the request's new tokens.
With no tiles each request has one new token, at the position that `spans` holds three times; slots are not read.
"""
