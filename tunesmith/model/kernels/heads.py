"""Device functions that attention kernels share: head norm, rotary embedding, softcap."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def apply_softcap(scores, softcap, HAS_SOFTCAP: tl.constexpr):
    """softcap * tanh(scores / softcap)."""
    if HAS_SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    return scores


@triton.jit
def load_heads(
    heads_N, cos_N, sin_N, norm_weight, epsilon, is_head_N,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr,
):  # fmt: skip
    """Load head vectors [N, D]; apply RMS norm, then the rotary embedding, as the flags select.

    `heads_N`, `cos_N` and `sin_N` point to the first element of each head's vector and of its cosine and sine rows.
    The rotary embedding rotates element i with element i + D / 2 (Su et al., 2021, in GPT-NeoX order).
    """
    sizes = tl.arange(0, SIZE_PAD)
    is_used = is_head_N[:, None] & (sizes < SIZE)[None, :]
    x = tl.load(heads_N[:, None] + sizes[None, :], mask=is_used, other=0.0)
    if HAS_NORM or HAS_ROPE:
        dtype = x.dtype
        half: tl.constexpr = SIZE // 2
        partner = tl.where(sizes < half, sizes + half, sizes - half)
        x = x.to(tl.float32)
        if HAS_ROPE:
            partner_x = tl.load(heads_N[:, None] + partner[None, :], mask=is_used, other=0.0).to(tl.float32)
        if HAS_NORM:
            inverse = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + epsilon)[:, None]
            x = x * inverse * tl.load(norm_weight + sizes, mask=sizes < SIZE, other=0.0).to(tl.float32)[None, :]
            if HAS_ROPE:
                partner_weight = tl.load(norm_weight + partner, mask=sizes < SIZE, other=0.0).to(tl.float32)
                partner_x = partner_x * inverse * partner_weight[None, :]
        if HAS_ROPE:
            cosine = tl.load(cos_N[:, None] + sizes[None, :], mask=is_used, other=0.0).to(tl.float32)
            sine = tl.load(sin_N[:, None] + sizes[None, :], mask=is_used, other=0.0).to(tl.float32)
            x = x * cosine + tl.where(sizes[None, :] < half, -partner_x, partner_x) * sine
        x = x.to(dtype)
    return x
