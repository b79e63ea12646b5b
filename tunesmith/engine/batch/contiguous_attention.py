"""Decode attention over contiguous runs of KV-cache blocks, read as views without copying.

Each request has one new token. Its context is a few runs of adjacent blocks, each one view of a head's keys; the scores
of all runs are concatenated before the softmax. Requests with a shared prefix form a group (as in cascade attention):
the shared blocks are multiplied with the queries of all members at once, and so are read once.

Axes: T tokens, R requests, H query heads, K key-value heads, G query heads of one key-value head, P physical blocks, Z
tokens of a block, S tokens of a run, N = R x G queries of a head, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tunesmith.engine.core.span import Span
from tunesmith.model.forward.attention import AttentionOptions, compute_weights


@dataclass(frozen=True, slots=True)
class KeyRun:
    """Tokens that are contiguous in the cache, and the requests that attend to them."""

    rows: tuple[int, int]
    """Range of requests, as indices into the group's members."""
    columns: tuple[int, int]
    """Range of columns in the scores."""
    slot: int
    """Index of the first token in the cache."""


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Requests with a shared prefix, or a single request."""

    members: tuple[int, ...]
    lengths: tuple[int, ...]
    """Number of tokens that each member attends to."""
    key_runs: tuple[KeyRun, ...]
    """All members attend to the first of them."""


def find_groups(spans: Sequence[Span], *, block_size: int, sliding_window: int | None) -> list[PrefixGroup]:
    """Group requests by shared prefix; one whose sliding window excludes its first block forms its own group."""
    members_of: dict[object, list[int]] = {}
    for index, span in enumerate(spans):
        is_whole = sliding_window is None or span.stop <= sliding_window
        members_of.setdefault(span.blocks[0] if is_whole else (index,), []).append(index)
    groups = []
    for members in members_of.values():
        if len(members) == 1:
            span = spans[members[0]]
            low = 0 if sliding_window is None else max(0, span.stop - sliding_window)
            key_runs = tuple(_cut_runs(span, (0, 1), low=low, start=low, stop=span.stop, block_size=block_size))
            groups.append(PrefixGroup((members[0],), (span.stop - low,), key_runs))
        else:
            ordered, shared = _split_group(spans, members, num_blocks=0, first=0, block_size=block_size)
            groups.append(PrefixGroup(tuple(ordered), tuple(spans[index].stop for index in ordered), tuple(shared)))
    return groups


def _split_group(
    spans: Sequence[Span], members: list[int], *, num_blocks: int, first: int, block_size: int
) -> tuple[list[int], list[KeyRun]]:
    """Order members that share `num_blocks` blocks, so that those that share more are adjacent; `first` is the row of
    the first member."""
    lead = spans[members[0]]
    start = num_blocks * block_size
    if len(members) == 1:
        rows = (first, first + 1)
        return members, list(_cut_runs(lead, rows, low=0, start=start, stop=lead.stop, block_size=block_size))
    num_blocks = min(_count_shared(lead, spans[index]) for index in members[1:])
    stop = min(num_blocks * block_size, min(spans[index].stop for index in members))
    rows = (first, first + len(members))
    key_runs = list(_cut_runs(lead, rows, low=0, start=start, stop=stop, block_size=block_size))
    children: dict[int, list[int]] = {}
    for index in members:
        block = spans[index].blocks[num_blocks] if spans[index].stop > num_blocks * block_size else -1
        children.setdefault(block, []).append(index)
    ordered: list[int] = []
    for block, child in children.items():
        if block >= 0:
            child, child_runs = _split_group(
                spans, child, num_blocks=num_blocks, first=first + len(ordered), block_size=block_size
            )
            key_runs += child_runs
        ordered += child
    return ordered, key_runs


def _count_shared(left: Span, right: Span) -> int:
    """Length of the common prefix of two requests, in blocks."""
    num_blocks = 0
    for run, other in zip(left.runs, right.runs, strict=False):
        if run.first != other.first:
            break
        num_blocks += min(run.num_blocks, other.num_blocks)
        if run.num_blocks != other.num_blocks:
            break
    return num_blocks


def _cut_runs(
    span: Span, rows: tuple[int, int], *, low: int, start: int, stop: int, block_size: int
) -> Iterator[KeyRun]:
    """The runs' tokens from `start` to `stop`; column 0 of the scores is token `low`."""
    first = 0
    for run in span.runs:
        last = first + run.num_blocks * block_size
        begin, end = max(first, start), min(last, stop)
        if begin < end:
            yield KeyRun(rows, (begin - low, end - low), run.first * block_size + begin - first)
        first = last


class _Layout:
    """Groups, and the permutation of requests that makes members of a group adjacent."""

    def __init__(self, groups: list[PrefixGroup], device: torch.device) -> None:
        self.groups = groups
        order = [member for group in groups for member in group.members]
        self.order: Tensor | None = None
        self.inverse: Tensor | None = None
        if order != sorted(order):
            self.order = torch.tensor(order, device=device)
            self.inverse = self.order.argsort()


class ContiguousBatch:
    """Requests with one new token each, adjacent in the step's row."""

    def __init__(self, spans: Sequence[Span], *, block_size: int, device: torch.device) -> None:
        self.first, self.last = spans[0].first, spans[-1].first + 1
        self._spans = spans
        self._longest = max(span.stop for span in spans)
        self._block_size = block_size
        self._device = device
        self._layouts: dict[int | None, _Layout] = {}

    def attend(self, query_THD: Tensor, keys_KPZD: Tensor, values_KPZD: Tensor, options: AttentionOptions) -> Tensor:
        """Attention output [T, H, D] of the batch's tokens, given their queries [T, H, D]."""
        num_kv_heads, head_size, num_rows = keys_KPZD.shape[0], keys_KPZD.shape[-1], len(self._spans)
        num_groups = query_THD.shape[1] // num_kv_heads
        layout, softcap = self._get_layout(options.sliding_window), options.softcap
        scaling = options.get_scaling(head_size)
        query_THD = query_THD * (scaling if softcap is None else scaling / softcap)
        if layout.order is not None:
            query_THD = query_THD[layout.order]
        query_RKGD = query_THD.reshape(num_rows, num_kv_heads, num_groups, head_size)
        query_KND = query_RKGD.transpose(0, 1).reshape(num_kv_heads, num_rows * num_groups, head_size)
        keys_KSD, values_KSD = (
            keys_KPZD.view(num_kv_heads, -1, head_size),
            values_KPZD.view(num_kv_heads, -1, head_size),
        )
        output_KND = torch.empty_like(query_KND)
        first = 0
        for group in layout.groups:
            num_queries = len(group.members) * num_groups
            _attend_group(
                group,
                query_KND.narrow(1, first, num_queries),
                keys_KSD,
                values_KSD,
                output_KND.narrow(1, first, num_queries),
                num_groups=num_groups,
                softcap=softcap,
                sinks=options.sinks,
            )
            first += num_queries
        output_RKGD = output_KND.view(num_kv_heads, num_rows, num_groups, head_size).transpose(0, 1)
        output_THD = output_RKGD.reshape(num_rows, -1, head_size)
        return output_THD if layout.inverse is None else output_THD[layout.inverse]

    def _get_layout(self, sliding_window: int | None) -> _Layout:
        if sliding_window is not None and sliding_window >= self._longest:
            sliding_window = None
        if sliding_window not in self._layouts:
            groups = find_groups(self._spans, block_size=self._block_size, sliding_window=sliding_window)
            self._layouts[sliding_window] = _Layout(groups, self._device)
        return self._layouts[sliding_window]


def _attend_group(
    group: PrefixGroup,
    query_KND: Tensor,
    keys_KSD: Tensor,
    values_KSD: Tensor,
    output_KND: Tensor,
    *,
    num_groups: int,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Write the attention output of the group's queries to `output_KND`."""
    scores = _compute_scores(group, query_KND, keys_KSD, num_groups=num_groups)
    if softcap is not None:
        scores = scores.tanh_().mul_(softcap)
    longest = scores.shape[2]
    for row, length in enumerate(group.lengths):
        if length < longest:
            scores[:, row * num_groups : (row + 1) * num_groups, length:] = -math.inf
    if sinks is not None:
        sinks = sinks.view(len(scores), num_groups, 1).repeat(1, len(group.members), 1)
    weights = compute_weights(scores, sinks).to(values_KSD.dtype)
    for index, key_run in enumerate(group.key_runs):
        first, last = key_run.rows[0] * num_groups, key_run.rows[1] * num_groups
        begin, end = key_run.columns
        values = values_KSD[:, key_run.slot : key_run.slot + end - begin]
        if index == 0:
            torch.bmm(weights[:, :, begin:end], values, out=output_KND)
        else:
            output_KND[:, first:last].baddbmm_(weights[:, first:last, begin:end], values)


def _compute_scores(group: PrefixGroup, query_KND: Tensor, keys_KSD: Tensor, *, num_groups: int) -> Tensor:
    """Scores [K, N, longest context]; columns past a shorter context are uninitialized."""
    num_kv_heads, num_queries, _ = query_KND.shape
    if len(group.key_runs) == 1:
        key_run = group.key_runs[0]
        keys = keys_KSD[:, key_run.slot : key_run.slot + key_run.columns[1]]
        return query_KND.bmm(keys.transpose(1, 2))
    scores = query_KND.new_empty(num_kv_heads, num_queries, max(group.lengths))
    for key_run in group.key_runs:
        first, last = key_run.rows[0] * num_groups, key_run.rows[1] * num_groups
        begin, end = key_run.columns
        keys = keys_KSD[:, key_run.slot : key_run.slot + end - begin]
        torch.bmm(query_KND[:, first:last], keys.transpose(1, 2), out=scores[:, first:last, begin:end])
    return scores
