"""Attention over pages as operators that torch can trace; the kernels that compute them are elsewhere.

On a CUDA device `engine.cuda.kernels` implements them. Named apart, they can be traced, and a traced layer can be
rewritten, where there is no such device.

Axes: R requests, T tokens, I tiles, H query heads, K key-value heads, D head size, P pages, Z page size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_PAGES = "Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values"
_SCORES = "float scaling, int sliding_window, float softcap"

torch.library.define(
    "tunesmith::paged_decode",
    f"({_PAGES}, Tensor table, Tensor positions, {_SCORES}) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.define(
    "tunesmith::paged_prefill",
    f"({_PAGES}, Tensor slots, Tensor table, Tensor spans, Tensor tiles, {_SCORES}) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.register_fake("tunesmith::paged_decode")
@torch.library.register_fake("tunesmith::paged_prefill")
def _build_output(query_1HTD: Tensor, *_rest: object) -> Tensor:
    _, num_heads, num_tokens, size = query_1HTD.shape
    return query_1HTD.new_empty((1, num_tokens, num_heads, size))


paged_decode = torch.ops.tunesmith.paged_decode.default
"""Write each request's new key and value [1, K, R, D] at its position, attend over all up to it: [1, R, H, D].

Takes query [1, H, R, D], the layer's pages [P, K, Z, D], the page table [R, columns] (int32) and positions [R]. The
last axis of query, key and value has stride 1; `sliding_window` and `softcap` 0 mean none.
"""
paged_prefill = torch.ops.tunesmith.paged_prefill.default
"""Write the new keys and values [1, K, T, D], attend over each request's context up to each token: [1, T, H, D].

`slots` [T] is a token's page times the page size plus its place there. `spans` [3, R] (int32) holds, of each request,
the index of its first new token in the row, that token's position, and the position after its last. `tiles` [2, I]
(int32) holds the request of each tile and its first token's index among the request's new ones.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prologue:
    """What is done to query and key heads before they meet."""

    cos_1TD: Tensor
    sin_1TD: Tensor
    query_norm_D: Tensor | None = None
    """Weight of the RMS norm before the rotary embedding; None where there is none."""
    key_norm_D: Tensor | None = None
    epsilon: float = 0.0
