"""Rows as tensors: here, and nowhere earlier, samples become tensors.

The trained events of a row are cut into chunks of one sampling distribution each. Within a chunk, events that predict
the same token from the same node are one site: it is scored once.

Axes: T tokens of a row, S sites of a chunk, E events of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tunesmith.algorithms.scores import TokenInputs
from tunesmith.experience.trie import Trie
from tunesmith.trainer.tree_attention.plan import TreePlan, describe_attention
from tunesmith.trainer.tree_attention.tile_schedule import PADDING, pad_trie
from tunesmith.types import Distribution, Sample

UNTEMPERED = Distribution()
"""Of tokens whose sampling is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """What the tokens of a row's samples were sampled from."""

    distributions: tuple[Distribution, ...]
    """The different ones."""
    kind_N: np.ndarray
    """Which of them each token has, over all tokens of the row's samples in turn."""
    starts: np.ndarray
    """Where each sample's tokens begin, by its index in the batch; samples of other rows have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Events that are scored together."""

    distribution: Distribution
    node_S: Tensor
    """Position in the row whose hidden state predicts the token."""
    target_S: Tensor
    site_E: Tensor
    event_E: np.ndarray
    """Place of each event among those of the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One forward and backward."""

    input_ids_1T: Tensor
    position_ids_1T: Tensor
    plan: TreePlan
    chunks: tuple[Chunk, ...]
    node_S: Tensor
    """Of all chunks in turn."""
    event_E: np.ndarray
    """Of all chunks in turn."""
    is_real_E: np.ndarray | None
    """Where `event_E` does not only fill a chunk up; None: nowhere."""
    numbers: Tensor
    """The memory of all integers above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentInputs:
    """What events are given, in one tensor."""

    names: tuple[str, ...]
    """The fields of `TokenInputs` that are there."""
    values_FE: Tensor

    def select(self, part: slice) -> SentInputs:
        """Those of some events, side by side in memory whether they are all or not: compiled code is for one layout."""
        return SentInputs(names=self.names, values_FE=self.values_FE[:, part].contiguous())

    def unstack(self) -> TokenInputs[Tensor]:
        return TokenInputs(**dict(zip(self.names, self.values_FE.unbind(), strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sites:
    """Sites of one chunk, and which of the row's events they score."""

    distribution: Distribution
    node_S: np.ndarray
    target_S: np.ndarray
    site_E: np.ndarray
    event_E: np.ndarray
    is_real_E: np.ndarray | None = None


def build_row(trie: Trie, kinds: Kinds, *, chunk_tokens: int, model: PreTrainedModel, is_rounded: bool = False) -> Row:
    """Tensors of one packed row for the model; on a GPU the row is filled up to whole tiles.

    `kinds` are of the trie. A row that `is_rounded` is filled up further, to one of few sizes; what fills it has no
    weight.
    """
    sites = list(_cut_chunks(trie, kinds, chunk_tokens))
    if is_rounded:
        trie, sites = pad_trie(trie, _choose_multiple(trie.num_tokens)), _fill_chunks(sites, chunk_tokens)
    filled = pad_trie(trie) if model.device.type == "cuda" else trie
    names = ("node_S", "target_S", "site_E")
    columns = [np.concatenate([getattr(part, name) for part in sites]) for name in names]
    arrays = [filled.token_ids_T, filled.depth_T, *columns]
    numbers = send(np.concatenate(arrays), model.device)
    ids_T, depth_T, node_S, target_S, site_E = numbers.split([len(array) for array in arrays])
    num_sites, num_events = [len(part.node_S) for part in sites], [len(part.site_E) for part in sites]
    split = zip(sites, node_S.split(num_sites), target_S.split(num_sites), site_E.split(num_events), strict=True)
    return Row(
        input_ids_1T=ids_T[None],
        position_ids_1T=depth_T[None],
        plan=TreePlan(trie, model.device, **describe_attention(model)),
        chunks=tuple(
            Chunk(distribution=part.distribution, node_S=nodes, target_S=targets, site_E=places, event_E=part.event_E)
            for part, nodes, targets, places in split
        ),
        node_S=node_S,
        event_E=np.concatenate([part.event_E for part in sites]),
        is_real_E=np.concatenate([part.is_real_E for part in sites]) if is_rounded else None,
        numbers=numbers,
    )


def number_distributions(samples: Sequence[Sample], trie: Trie) -> Kinds:
    """Number the distributions of the samples in a row; tokens that were not sampled are untempered, number 0."""
    indices = np.flatnonzero(np.bincount(trie.sample_E)).tolist()
    starts = np.zeros(len(samples), dtype=np.int64)
    starts[indices] = np.cumsum([0, *(len(samples[index].token_ids) for index in indices)])[:-1]
    kind_N = np.zeros(sum(len(samples[index].token_ids) for index in indices), dtype=np.int64)
    kind_of = {UNTEMPERED: 0}
    for index in indices:
        for span in samples[index].distribution_spans:
            kind = kind_of.setdefault(span.distribution, len(kind_of))
            kind_N[starts[index] + span.start : starts[index] + span.end] = kind
    return Kinds(distributions=tuple(kind_of), kind_N=kind_N, starts=starts)


def send(values: np.ndarray, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """The values as a tensor; on their way to a GPU nobody waits for them."""
    tensor = torch.from_numpy(values).to(dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def send_inputs(inputs: TokenInputs[np.ndarray], row: Row, *, device: torch.device, dtype: torch.dtype) -> SentInputs:
    """What the events of a row's chunks are given, in the type of logprobs; `inputs` are of the row's events."""
    given = inputs.convert(lambda values_E: values_E[row.event_E].astype(np.float64))
    if row.is_real_E is not None:
        weights_E, is_newest_E = given.weights_E * row.is_real_E, given.is_newest_E * row.is_real_E
        is_real_E = row.is_real_E.astype(np.float64)
        given = replace(given, weights_E=weights_E, is_newest_E=is_newest_E, is_real_E=is_real_E)
    values = {field.name: getattr(given, field.name) for field in fields(given)}
    values = {name: values_E for name, values_E in values.items() if values_E is not None}
    return SentInputs(names=tuple(values), values_FE=send(np.stack(list(values.values())), device, dtype))


def _cut_chunks(trie: Trie, kinds: Kinds, chunk_tokens: int) -> Iterator[_Sites]:
    """Chunks of at most `chunk_tokens` sites; the events of a site stay together."""
    kind_E = kinds.kind_N[kinds.starts[trie.sample_E] + trie.time_E]
    num_ids = int(trie.target_E.max(initial=0)) + 1
    for kind in np.flatnonzero(np.bincount(kind_E)).tolist():
        event_E = np.flatnonzero(kind_E == kind)
        key_E = trie.parent_E[event_E] * num_ids + trie.target_E[event_E]
        order_E = np.argsort(key_E, kind="stable")
        event_E, key_E = event_E[order_E], key_E[order_E]
        is_first_E = np.diff(key_E, prepend=-1) != 0
        key_S, site_E = key_E[is_first_E], np.cumsum(is_first_E) - 1
        for first in range(0, len(key_S), chunk_tokens):
            start, end = np.searchsorted(site_E, [first, first + chunk_tokens])
            yield _Sites(
                distribution=kinds.distributions[kind],
                node_S=key_S[first : first + chunk_tokens] // num_ids,
                target_S=key_S[first : first + chunk_tokens] % num_ids,
                site_E=site_E[start:end] - first,
                event_E=event_E[start:end],
            )


def _choose_multiple(num_tokens: int) -> int:
    """What to fill a row up to: it grows by an eighth at most, so few sizes serve all rows."""
    return max(PADDING, 2 ** (num_tokens.bit_length() - 1) // 8)


def _fill_chunks(sites: Sequence[_Sites], chunk_tokens: int) -> list[_Sites]:
    """Chunks of one size: each repeats its last site, for no event, and its last event, which then is not real."""
    most = max(chunk_tokens, *(len(part.event_E) for part in sites))
    most += -most % max(chunk_tokens // 4, 1)
    filled = []
    for part in sites:
        num_events = len(part.event_E)
        site_S = np.minimum(np.arange(chunk_tokens), len(part.node_S) - 1)
        event_E = np.minimum(np.arange(most), num_events - 1)
        filled.append(
            _Sites(
                distribution=part.distribution,
                node_S=part.node_S[site_S],
                target_S=part.target_S[site_S],
                site_E=part.site_E[event_E],
                event_E=part.event_E[event_E],
                is_real_E=np.arange(most) < num_events,
            )
        )
    return filled
