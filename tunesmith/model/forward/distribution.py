"""The sampling distribution as a function of logits: bias, penalties and bans, temperature, top-k, top-p, min-p.

Engine and trainer share this definition: a sampled token's logprob is `log_softmax(truncate_logits(...))`. Each filter
is a threshold on the logit, so equal logits are kept or dropped together and the result does not depend on sort order.

Penalties and bans are how the tokens of a turn change the logits of the next one. The sampler applies them to the
logits of a step, the trainer to those of recorded tokens, so both score one distribution. Repetition, presence and
frequency penalties change single logits; ids that would end a reply too early, complete a forbidden sequence or leave
the grammar are banned, that is set to -inf.

Axes: N positions, V vocabulary, B biased tokens, P penalized and B banned (position, id) pairs, M positions with a
grammar, Y bytes of a bitmask. K ids of replies and their prompts, J tokens of replies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tunesmith.model.arrays import copy_to_device
from tunesmith.types import Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenContext:
    """What determines the penalties and bans of one position."""

    distribution: Distribution
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    """Tokens of the reply, the same object at all of its positions."""
    num_outputs: int
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
            bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=logits_NV.device)
            is_banned_MV = (self.masks_MY[:, :, None] & bits).eq(0).flatten(1)[:, : logits_NV.shape[1]]
            if len(self.masked_M) == len(logits_NV):  # all positions, in order
                return logits_NV.masked_fill(is_banned_MV, -math.inf)
            masked_MV = logits_NV[self.masked_M].masked_fill(is_banned_MV, -math.inf)
            logits_NV = logits_NV.index_copy(0, self.masked_M, masked_MV)
        return logits_NV


@dataclass(slots=True)
class _Runs:
    """Ids that are penalized at consecutive positions, while they are collected: from a start on, to the reply's last.

    Their pairs of position and id are as many as the square of a reply's length, and are listed on the device. The host
    lists ids and occurrences, as many as the tokens of the replies.
    """

    ints: list[NDArray[np.int64]] = field(default_factory=list)
    """Ids, starts, numbers of positions, and occurrences in the reply before the start [4, K]."""
    penalties: list[tuple[float, float, float]] = field(default_factory=list)
    """Repetition, presence and frequency penalty of each of `ints`."""
    occurrences: list[NDArray[np.int64]] = field(default_factory=list)
    """Index of the run, and the first position after it, of each further token of the replies [2, J]."""
    num_runs: int = 0

    def add(self, first: int, contexts: Sequence[TokenContext]) -> None:
        """The penalties of positions of one reply, from position `first` on."""
        distribution, prompt_ids, output_ids = contexts[0].distribution, contexts[0].prompt_ids, contexts[0].output_ids
        num_before, num_outputs = contexts[0].num_outputs, contexts[-1].num_outputs
        ids, counts = np.unique(np.asarray(output_ids[:num_before], dtype=np.int64), return_counts=True)
        if distribution.repetition_penalty != 1:
            reply_ids, reply_counts = ids, counts
            ids = np.union1d(reply_ids, np.asarray(prompt_ids, dtype=np.int64))
            counts = np.zeros(len(ids), dtype=np.int64)
            counts[np.searchsorted(ids, reply_ids)] = reply_counts
        starts = np.full(len(ids), first, dtype=np.int64)
        if num_outputs > num_before:
            further_J = np.asarray(output_ids[num_before:num_outputs], dtype=np.int64)
            ends_N = np.asarray([context.num_outputs for context in contexts])
            position_J = first + np.searchsorted(ends_N, np.arange(num_before + 1, num_outputs + 1))
            found, index, inverse_J = np.unique(further_J, return_index=True, return_inverse=True)
            is_new = ~np.isin(found, ids)
            run = np.where(is_new, len(ids) + np.cumsum(is_new) - 1, np.searchsorted(ids, found))
            self.occurrences.append(np.stack([self.num_runs + run[inverse_J], position_J]))
            ids = np.concatenate([ids, found[is_new]])
            starts = np.concatenate([starts, position_J[index[is_new]]])
            counts = np.concatenate([counts, np.zeros(is_new.sum(), dtype=np.int64)])
        self.ints.append(np.stack([ids, starts, first + len(contexts) - starts, counts]))
        self.penalties.append(
            (distribution.repetition_penalty, distribution.presence_penalty, distribution.frequency_penalty)
        )
        self.num_runs += len(ids)

    def build(self, put: Callable[[NDArray[np.generic]], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """All pairs [2, P], with their repetition penalties and decrements, on the device."""
        ids, starts, lengths, counts = np.concatenate([np.zeros((4, 0), dtype=np.int64), *self.ints], axis=1)
        sizes = [part.shape[1] for part in self.ints]
        penalties = np.repeat(np.asarray(self.penalties).reshape(-1, 3), sizes, axis=0).T
        num_pairs = int(lengths.sum())
        if num_pairs == self.num_runs and not self.occurrences:  # single positions, as in the sampler
            decrements = penalties[1] * (counts > 0) + penalties[2] * counts
            return put(np.stack([starts, ids])), put(penalties[0]), put(decrements)
        run_J, position_J = np.concatenate([np.zeros((2, 0), dtype=np.int64), *self.occurrences], axis=1)
        offsets = np.cumsum(lengths) - lengths
        num_earlier = np.searchsorted(np.sort(run_J), np.arange(self.num_runs))
        pair_J = put(offsets[run_J] + position_J - starts[run_J])
        columns = put(np.stack([ids, starts - offsets, lengths, counts - num_earlier]))
        run_P = torch.repeat_interleave(columns[2], output_size=num_pairs)
        ids_P, shifts_P, _, before_P = columns[:, run_P]
        factors_P, presence_P, frequency_P = put(penalties)[:, run_P]
        counts_P = torch.zeros_like(run_P).index_add_(0, pair_J, torch.ones_like(pair_J)).cumsum(0) + before_P
        positions_P = torch.arange(num_pairs, device=run_P.device) + shifts_P
        return torch.stack([positions_P, ids_P]), factors_P, presence_P * (counts_P > 0) + frequency_P * counts_P


def build_adjustment(contexts: Sequence[TokenContext], device: torch.device) -> LogitAdjustment | None:
    """The adjustment of positions in order; None if no position has any."""
    runs, banned, masked, masks = _Runs(), [], [], []
    for row, context in enumerate(contexts):
        banned += [(row, token_id) for token_id in find_banned_ids(context)]
        if context.token_mask is not None:
            masked.append(row)
            masks.append(np.frombuffer(context.token_mask, dtype=np.uint8))
    for first, end in _split_replies(contexts):
        distribution = contexts[first].distribution
        if distribution.repetition_penalty != 1 or distribution.presence_penalty or distribution.frequency_penalty:
            runs.add(first, contexts[first:end])
    if not (runs.ints or banned or masked):
        return None
    put = partial(copy_to_device, device=device)
    penalized_2P, factors_P, decrements_P = runs.build(put)
    return LogitAdjustment(
        penalized_2P=penalized_2P,
        factors_P=factors_P,
        decrements_P=decrements_P,
        banned_2B=put(np.array(banned, dtype=np.int64).reshape(-1, 2).T),
        masked_M=put(np.array(masked, dtype=np.int64)),
        masks_MY=put(np.stack(masks) if masks else np.zeros((0, 0), dtype=np.uint8)),
    )


def _split_replies(contexts: Sequence[TokenContext]) -> list[tuple[int, int]]:
    """First and end of each run of positions that are in one reply, in order."""
    firsts = [
        row
        for row, (one, next_one) in enumerate(pairwise(contexts), start=1)
        if next_one.output_ids is not one.output_ids or next_one.num_outputs < one.num_outputs
    ]
    return list(pairwise([0, *firsts, len(contexts)]))


def find_banned_ids(context: TokenContext) -> list[int]:
    """Ids that `min_tokens` and `bad_words` ban at the position, in ascending order."""
    distribution, end = context.distribution, context.num_outputs
    banned = set(distribution.end_ids) if end < distribution.min_tokens else set()
    for word in distribution.bad_words:
        start = end - len(word) + 1
        if start >= 0 and tuple(context.output_ids[start:end]) == word[:-1]:
            banned.add(word[-1])
    return sorted(banned)


def truncate_logits(
    logits_NV: Tensor,
    distribution: Distribution,
    *,
    keep_ids_N: Tensor | None = None,
    adjustment: LogitAdjustment | None = None,
) -> Tensor:
    """Logits (float32 or wider) with bias and temperature applied and dropped tokens at -inf; the input is unchanged.

    `adjustment`: penalties and bans of the positions, which follow the bias. `keep_ids_N`: one token per position that
    no filter drops. A sampled token had positive probability, even if rounding moves it past a threshold. Temperature 0
    applies neither temperature nor filters.
    """
    if distribution.logit_bias:
        ids, values = zip(*distribution.logit_bias, strict=True)
        bias_B = torch.tensor(values, dtype=logits_NV.dtype, device=logits_NV.device)
        logits_NV = logits_NV.index_add(
            1, torch.tensor(ids, device=logits_NV.device), bias_B.expand(len(logits_NV), -1)
        )
    if adjustment is not None:
        logits_NV = adjustment.apply(logits_NV)
    if distribution.temperature == 0:
        return logits_NV
    if distribution.temperature != 1:
        logits_NV = logits_NV / distribution.temperature
    if not has_truncation(distribution):
        return logits_NV
    is_dropped_NV = logits_NV < _compute_thresholds(logits_NV.detach(), distribution)
    if keep_ids_N is not None:
        is_dropped_NV.scatter_(1, keep_ids_N[:, None], False)
    return logits_NV.masked_fill(is_dropped_NV, -math.inf)


def has_truncation(distribution: Distribution) -> bool:
    """Whether any filter can drop a token."""
    is_filtered = distribution.top_k > 0 or distribution.top_p < 1 or distribution.min_p > 0
    return is_filtered and distribution.temperature > 0


def _compute_thresholds(logits_NV: Tensor, distribution: Distribution) -> Tensor:
    """Smallest logit [N, 1] that every filter keeps; top-p and min-p see the tokens left by top-k, renormalized."""
    vocab_size = logits_NV.shape[1]
    threshold_N1 = torch.full_like(logits_NV[:, :1], -math.inf)
    if 0 < distribution.top_k < vocab_size:
        threshold_N1 = logits_NV.topk(distribution.top_k, dim=1).values[:, -1:]
    if distribution.top_p < 1:
        kept_NV = logits_NV.masked_fill(logits_NV < threshold_N1, -math.inf)
        sorted_NV = kept_NV.sort(dim=1, descending=True).values
        probs_NV = sorted_NV.softmax(dim=1)
        mass_before_NV = probs_NV.cumsum(dim=1) - probs_NV
        num_kept_N1 = (mass_before_NV < distribution.top_p).sum(dim=1, keepdim=True).clamp(min=1)
        threshold_N1 = torch.maximum(threshold_N1, sorted_NV.gather(1, num_kept_N1 - 1))
    if distribution.min_p > 0:
        threshold_N1 = torch.maximum(threshold_N1, logits_NV.amax(dim=1, keepdim=True) + math.log(distribution.min_p))
    return threshold_N1
