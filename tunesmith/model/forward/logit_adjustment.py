"""Penalties and bans: how the tokens of a turn change the logits of the next one.

The sampler applies them to the logits of a step, the trainer to those of recorded tokens, so both score one
distribution. Repetition, presence and frequency penalties change single logits; ids that would end a reply too early,
complete a forbidden sequence or leave the grammar are banned, that is set to -inf.

Axes: N positions, V vocabulary, P penalized and B banned (position, id) pairs, M positions with a grammar, Y bytes of a
bitmask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunesmith.types import Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenContext:
    """What determines the penalties and bans of one position."""

    distribution: Distribution
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    """Tokens of the reply before this position."""
    token_mask: bytes | NDArray[np.uint8] | None = None
    """Bits of the ids that the grammar allows, lowest bit first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitAdjustment:
    """Penalties and bans of several positions, on one device."""

    penalized_2P: Tensor
    """Positions and ids, each pair once."""
    factors_P: Tensor
    """Repetition penalties."""
    decrements_P: Tensor
    """Presence and frequency penalties."""
    banned_2B: Tensor
    masked_M: Tensor
    """Positions that have a grammar."""
    masks_MY: Tensor
    """Uint8: the ids that the grammar allows, lowest bit first."""

    def apply(self, logits_NV: Tensor) -> Tensor:
        """The changed logits; gradients flow through penalties. The input is unchanged."""
        if self.penalized_2P.numel():
            index = (self.penalized_2P[0], self.penalized_2P[1])
            values_P, factors_P = logits_NV[index], self.factors_P.to(logits_NV.dtype)
            values_P = torch.where(values_P > 0, values_P / factors_P, values_P * factors_P)
            logits_NV = logits_NV.index_put(index, values_P - self.decrements_P.to(logits_NV.dtype))
        if self.banned_2B.numel():
            minus_infinity = torch.full((), -math.inf, dtype=logits_NV.dtype, device=logits_NV.device)
            logits_NV = logits_NV.index_put((self.banned_2B[0], self.banned_2B[1]), minus_infinity)
        if self.masked_M.numel():
            is_banned_MV = ~unpack_masks(self.masks_MY, logits_NV.shape[1])
            if len(self.masked_M) == len(logits_NV):  # all positions, in order
                return logits_NV.masked_fill(is_banned_MV, -math.inf)
            masked_MV = logits_NV[self.masked_M].masked_fill(is_banned_MV, -math.inf)
            logits_NV = logits_NV.index_copy(0, self.masked_M, masked_MV)
        return logits_NV


def unpack_masks(masks_MY: Tensor, vocab_size: int) -> Tensor:
    """The bits of the masks as booleans [M, V]."""
    bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=masks_MY.device)
    return (masks_MY[:, :, None] & bits).ne(0).flatten(1)[:, :vocab_size]


@dataclass(slots=True)
class _Pairs:
    """Pairs of position and id with their values, while they are collected."""

    rows: list[NDArray[np.int64]] = field(default_factory=list)
    ids: list[NDArray[np.int64]] = field(default_factory=list)
    factors: list[NDArray[np.float64]] = field(default_factory=list)
    decrements: list[NDArray[np.floating[Any]]] = field(default_factory=list)

    def add(self, row: int, context: TokenContext) -> None:
        """The penalties of one position."""
        distribution = context.distribution
        output_ids, counts = np.unique(np.asarray(context.output_ids, dtype=np.int64), return_counts=True)
        decrements = distribution.presence_penalty + distribution.frequency_penalty * counts
        ids = output_ids
        if distribution.repetition_penalty != 1:
            ids = np.union1d(output_ids, np.asarray(context.prompt_ids, dtype=np.int64))
            decrements_of_output = decrements
            decrements = np.zeros(len(ids))
            decrements[np.searchsorted(ids, output_ids)] = decrements_of_output
        self.rows.append(np.full(len(ids), row, dtype=np.int64))
        self.ids.append(ids)
        self.factors.append(np.full(len(ids), distribution.repetition_penalty))
        self.decrements.append(decrements)


def build_adjustment(contexts: Sequence[TokenContext], device: torch.device) -> LogitAdjustment | None:
    """The adjustment of positions in order; None if no position has any."""
    pairs, banned, masked, masks = _Pairs(), [], [], []
    for row, context in enumerate(contexts):
        distribution = context.distribution
        if distribution.repetition_penalty != 1 or distribution.presence_penalty or distribution.frequency_penalty:
            pairs.add(row, context)
        banned += [(row, token_id) for token_id in find_banned_ids(distribution, context.output_ids)]
        if context.token_mask is not None:
            masked.append(row)
            masks.append(np.frombuffer(context.token_mask, dtype=np.uint8))
    if not (pairs.rows or banned or masked):
        return None

    def put(array: NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

    empty = np.zeros(0)
    rows, ids = (np.concatenate([empty, *parts]).astype(np.int64) for parts in (pairs.rows, pairs.ids))
    return LogitAdjustment(
        penalized_2P=put(np.stack([rows, ids])),
        factors_P=put(np.concatenate([empty, *pairs.factors])),
        decrements_P=put(np.concatenate([empty, *pairs.decrements])),
        banned_2B=put(np.array(banned, dtype=np.int64).reshape(-1, 2).T.copy()),
        masked_M=put(np.array(masked, dtype=np.int64)),
        masks_MY=put(np.stack(masks) if masks else np.zeros((0, 0), dtype=np.uint8)),
    )


def find_banned_ids(distribution: Distribution, output_ids: Sequence[int]) -> list[int]:
    """Ids that `min_tokens` and `bad_words` ban after these tokens of the reply, in ascending order."""
    banned = set(distribution.end_ids) if len(output_ids) < distribution.min_tokens else set()
    for word in distribution.bad_words:
        start = len(output_ids) - len(word) + 1
        if start >= 0 and tuple(output_ids[start:]) == word[:-1]:
            banned.add(word[-1])
    return sorted(banned)
