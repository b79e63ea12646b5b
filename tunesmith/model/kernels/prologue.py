"""What attention kernels apply to query and key heads first.

Axes: T tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Prologue:
    """What the attention kernels apply to query and key heads first: RMS norm (optional) and rotary embedding."""

    cos_1TD: Tensor
    sin_1TD: Tensor
    query_norm_D: Tensor | None = None
    """Weight of the RMS norm that precedes the rotary embedding; None without such a norm."""
    key_norm_D: Tensor | None = None
    epsilon: float = 0.0


def get_prologue_tensors(prologue: Prologue | None, unused: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cosine, sine and the two norm weights; `unused` is passed for those that the kernel does not read."""
    if prologue is None:
        return unused, unused, unused, unused
    query_norm, key_norm = prologue.query_norm_D, prologue.key_norm_D
    if query_norm is None or key_norm is None:
        query_norm = key_norm = unused
    return prologue.cos_1TD, prologue.sin_1TD, query_norm, key_norm
