"""Packed rows as tensors on the model's device.

The trained events of a row are split into chunks, each of one sampling distribution. Events of a chunk that predict the
same token from the same node share a *site*, which is scored once.

Axes: T tokens of a row, S sites of a chunk, E events of a chunk, N tokens of a row's samples, F fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tunesmith.algorithms.scores import TokenInputs, TokenScores
from tunesmith.errors import TrainingError
from tunesmith.experience.samples import EMPTY, Trie, read_array
from tunesmith.grammar.matcher import GrammarCompiler
from tunesmith.model.arrays import copy_to_device
from tunesmith.model.experts import ROUTING
from tunesmith.model.forward.distribution import LogitAdjustment, TokenContext, build_adjustment
from tunesmith.trainer.tree_attention.plan import TreePlan, describe_attention, describe_heads
from tunesmith.trainer.tree_attention.tile_schedule import PADDING, pad_trie
from tunesmith.types import Distribution, DistributionSpan, Sample

DEFAULT_DISTRIBUTION = Distribution()
"""For tokens without a recorded distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDistributions:
    """Sampling distributions of all tokens of a row's samples, as indices into the distinct ones.

    A distribution with penalties or bans is distinct for each first token of a turn, which these depend on.
    """

    samples: Sequence[Sample]
    """All samples of the batch."""
    unique: tuple[Distribution, ...]
    index_N: np.ndarray
    """Index into `unique` of each token, sample by sample."""
    starts: np.ndarray
    """Offset in `index_N` of each sample of the batch; meaningless for samples of other rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Events of one distribution, scored together."""

    distribution: Distribution
    adjustment: LogitAdjustment | None
    """Penalties and bans of the sites."""
    node_S: Tensor
    """Position in the row of the hidden state that predicts the token."""
    target_S: Tensor
    site_E: Tensor
    event_E: np.ndarray
    """Index of each event in the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """Tensors of one forward and backward."""

    input_ids_1T: Tensor
    position_ids_1T: Tensor
    plan: TreePlan
    chunks: tuple[Chunk, ...]
    node_S: Tensor
    """Concatenated over chunks."""
    event_E: np.ndarray
    """Concatenated over chunks."""
    is_real_E: np.ndarray | None
    """False where an event is padding; None: no padding."""
    int_buffer: Tensor
    """The storage that all integer tensors above are views of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkScores(TokenScores):
    """The scores of a chunk's events with the further columns that only the trainer reads."""

    weights_N: Tensor
    correction_N: Tensor
    sampler_logprobs_N: Tensor
    is_newest_N: Tensor
    reference_logprobs_N: Tensor | None = None
    """With a KL in the loss."""
    importance_caps_N: Tensor | None = None
    is_real_N: Tensor | None = None
    """0 for padding, which has no weight; None: no padding."""


LOSS_COLUMNS = {
    f"{name}_E": f"{name}_N"
    for name in (each.name.removesuffix("_N") for each in fields(ChunkScores))
    if name not in ("logprobs", "is_real")
}
"""Columns of `TokenInputs` that the loss pass reads, and their fields in `ChunkScores`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInputs:
    """The columns that the loss pass reads, for the events of all chunks, stacked in one tensor on the device."""

    names: tuple[str, ...]
    """Fields of `ChunkScores`."""
    values_FE: Tensor

    def select(self, part: slice) -> DeviceInputs:
        """A contiguous slice of the events, also for a slice of all: compiled code specializes on the layout."""
        return DeviceInputs(names=self.names, values_FE=self.values_FE[:, part].contiguous())


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChunkArrays:
    """One chunk as arrays: its sites and their events."""

    distribution: Distribution
    node_S: np.ndarray
    target_S: np.ndarray
    site_E: np.ndarray
    event_E: np.ndarray
    contexts_S: list[TokenContext] | None = None
    """For the penalties and bans of the sites; None without any."""
    is_real_E: np.ndarray | None = None


def build_row(
    trie: Trie, distributions: TokenDistributions, *, chunk_tokens: int, model: PreTrainedModel, is_padded: bool = False
) -> PackedRow:
    """Tensors of one packed row; on a GPU the row is padded to whole attention tiles.

    `distributions` are those of the trie. With `is_padded` row and chunks are padded further, to one of few sizes, for
    CUDA graphs; padding has no weight in the loss.
    """
    chunks = list(_split_chunks(trie, distributions, chunk_tokens))
    if is_padded:
        multiple = max(PADDING, 2 ** (trie.num_tokens.bit_length() - 1) // 8)  # at most an eighth: few sizes
        trie, chunks = pad_trie(trie, multiple), _pad_chunks(chunks, chunk_tokens)
    padded = pad_trie(trie) if model.device.type == "cuda" else trie
    names = ("node_S", "target_S", "site_E")
    columns = [np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in names]
    arrays = [padded.token_ids_T, padded.depth_T, *columns]
    int_buffer = copy_to_device(np.concatenate(arrays), model.device, torch.int64)
    ids_T, depth_T, node_S, target_S, site_E = int_buffer.split([len(array) for array in arrays])
    num_sites, num_events = [len(chunk.node_S) for chunk in chunks], [len(chunk.site_E) for chunk in chunks]
    split = zip(chunks, node_S.split(num_sites), target_S.split(num_sites), site_E.split(num_events), strict=True)
    return PackedRow(
        input_ids_1T=ids_T[None],
        position_ids_1T=depth_T[None],
        plan=TreePlan(trie, model.device, **describe_attention(model), heads=describe_heads(model)),
        chunks=tuple(
            Chunk(
                distribution=chunk.distribution,
                adjustment=None if chunk.contexts_S is None else build_adjustment(chunk.contexts_S, model.device),
                node_S=nodes,
                target_S=targets,
                site_E=places,
                event_E=chunk.event_E,
            )
            for chunk, nodes, targets, places in split
        ),
        node_S=node_S,
        event_E=np.concatenate([chunk.event_E for chunk in chunks]),
        is_real_E=np.concatenate([chunk.is_real_E for chunk in chunks]) if is_padded else None,
        int_buffer=int_buffer,
    )


def routed(model: PreTrainedModel, samples: Sequence[Sample], trie: Trie, row: PackedRow) -> Any:
    """Within, routers compute the row of a trie: with its recorded routes, and a weight for each sampled token."""
    routing = getattr(model, ROUTING, None)
    if routing is None or not (routing.has_replay or routing.balance_coef or torch.is_grad_enabled()):
        return nullcontext()
    is_sampled_E = ~np.array([each.is_expert for each in samples])[trie.sample_E]
    weight_T = np.bincount(trie.parent_E, is_sampled_E, minlength=trie.num_tokens)
    routes_TLK = gather_routes(samples, trie) if routing.has_replay else None
    return routing.applied(row.input_ids_1T.shape[1], routes_TLK, weight_T)


def gather_routes(samples: Sequence[Sample], trie: Trie) -> np.ndarray | None:
    """The recorded routes [T, L, K] of the nodes, each of its first sample; None without any."""
    first = next((each.routes for each in samples if each.routes is not None), None)
    if first is None:
        return None
    routes_TLK = np.full((trie.num_tokens, *first.shape[1:]), -1, dtype=first.dtype)
    starts = np.flatnonzero(np.diff(trie.owner_T, prepend=-1)).tolist()
    for start, end in zip(starts, [*starts[1:], trie.num_tokens], strict=True):
        if (routes := samples[trie.owner_T[start]].routes) is not None:
            routes_TLK[start:end] = routes[trie.depth_T[start] :][: end - start]
    return routes_TLK


def index_distributions(samples: Sequence[Sample], trie: Trie) -> TokenDistributions:
    """Sampling distributions of the samples in a row; tokens that were not sampled have the default one, index 0."""
    indices = np.flatnonzero(np.bincount(trie.sample_E)).tolist()
    starts = np.zeros(len(samples), dtype=np.int64)
    starts[indices] = np.cumsum([0, *(len(samples[index].token_ids) for index in indices)])[:-1]
    index_N = np.zeros(sum(len(samples[index].token_ids) for index in indices), dtype=np.int64)
    index_of = {(DEFAULT_DISTRIBUTION, 0): 0}
    for sample in indices:
        for span in samples[sample].distribution_spans:
            key = (span.distribution, span.start if span.distribution.depends_on_context else 0)
            index = index_of.setdefault(key, len(index_of))
            index_N[starts[sample] + span.start : starts[sample] + span.end] = index
    unique = tuple(distribution for distribution, _ in index_of)
    return TokenDistributions(samples=samples, unique=unique, index_N=index_N, starts=starts)


def find_contexts(sample: Sample, time_N: Sequence[int]) -> list[TokenContext]:
    """The contexts of tokens of a sample, at these indices, which were all sampled in one of its turns."""
    span = next(span for span in sample.distribution_spans if span.start <= time_N[0] < span.end)
    if span.distribution.grammar and span.token_masks is None:
        raise TrainingError(
            "a token was sampled under a grammar, but the trainer has no grammar compiler to score it with: pass "
            "`grammars` to the trainer"
        )
    prompt_ids, output_ids = sample.token_ids[: span.start], sample.token_ids[span.start : span.end]
    return [
        TokenContext(
            distribution=span.distribution,
            prompt_ids=prompt_ids,
            output_ids=output_ids,
            num_outputs=time - span.start,
            token_mask=None if span.token_masks is None else span.token_masks[time - span.start],
        )
        for time in time_N
    ]


def attach_token_masks(samples: Sequence[Sample], grammars: GrammarCompiler | None) -> Sequence[Sample]:
    """The samples, with masks in every span that has a grammar, computed again from the grammar and the ids."""
    if not any(span.distribution.grammar for sample in samples for span in sample.distribution_spans):
        return samples
    if grammars is None:
        raise TrainingError("tokens were sampled under a grammar: pass the engine's `grammars` to the trainer")
    return [
        replace(
            sample,
            distribution_spans=tuple(_attach_masks(span, sample, grammars) for span in sample.distribution_spans),
        )
        for sample in samples
    ]


def _attach_masks(span: DistributionSpan, sample: Sample, grammars: GrammarCompiler) -> DistributionSpan:
    if not span.distribution.grammar:
        return span
    token_ids = sample.token_ids[span.start : span.end]
    try:
        return replace(span, token_masks=grammars.compute_masks(span.distribution.grammar, token_ids))
    except ValueError as error:
        raise TrainingError(
            f"a reply cannot be scored under the grammar that it was sampled with ({error}): the tokenizer or the "
            "version of llguidance has changed since"
        ) from error


def copy_inputs_to_device(
    inputs: TokenInputs, row: PackedRow, *, device: torch.device, dtype: torch.dtype
) -> DeviceInputs:
    """Gather the inputs of the row's events in the order of its chunks, in `dtype`; padding gets weight 0."""
    columns = inputs.list_columns()
    values = {
        field: columns[name][row.event_E].astype(np.float64) for name, field in LOSS_COLUMNS.items() if name in columns
    }
    if row.is_real_E is not None:
        values["weights_N"] = values["weights_N"] * row.is_real_E
        values["is_newest_N"] = values["is_newest_N"] * row.is_real_E
        values["is_real_N"] = row.is_real_E.astype(np.float64)
    return DeviceInputs(names=tuple(values), values_FE=copy_to_device(np.stack(list(values.values())), device, dtype))


def _split_chunks(trie: Trie, distributions: TokenDistributions, chunk_tokens: int) -> Iterator[_ChunkArrays]:
    """Chunks of at most `chunk_tokens` sites; the events of a site are in one chunk."""
    index_E = distributions.index_N[distributions.starts[trie.sample_E] + trie.time_E]
    num_ids = int(trie.target_E.max(initial=0)) + 1
    for index in np.flatnonzero(np.bincount(index_E)).tolist():
        event_E = np.flatnonzero(index_E == index)
        key_E = trie.parent_E[event_E] * num_ids + trie.target_E[event_E]
        order_E = np.argsort(key_E, kind="stable")
        event_E, key_E = event_E[order_E], key_E[order_E]
        is_first_E = np.diff(key_E, prepend=-1) != 0
        key_S, site_E = key_E[is_first_E], np.cumsum(is_first_E) - 1
        first_event_S, distribution = event_E[is_first_E], distributions.unique[index]
        for first in range(0, len(key_S), chunk_tokens):
            start, end = np.searchsorted(site_E, [first, first + chunk_tokens])
            firsts = first_event_S[first : first + chunk_tokens][: None if distribution.depends_on_context else 0]
            sites = zip(trie.sample_E[firsts].tolist(), trie.time_E[firsts].tolist(), strict=True)
            contexts_S = [
                context
                for sample, group in groupby(sites, key=itemgetter(0))
                for context in find_contexts(distributions.samples[sample], [time for _, time in group])
            ]
            yield _ChunkArrays(
                distribution=distribution,
                contexts_S=contexts_S or None,
                node_S=key_S[first : first + chunk_tokens] // num_ids,
                target_S=key_S[first : first + chunk_tokens] % num_ids,
                site_E=site_E[start:end] - first,
                event_E=event_E[start:end],
            )


def _pad_chunks(chunks: Sequence[_ChunkArrays], chunk_tokens: int) -> list[_ChunkArrays]:
    """Pad all chunks to one size by repeating the last site and the last event; `is_real_E` is False at padding."""
    max_events = max(chunk_tokens, *(len(chunk.event_E) for chunk in chunks))
    max_events += -max_events % max(chunk_tokens // 4, 1)
    padded = []
    for chunk in chunks:
        num_events = len(chunk.event_E)
        site_S = np.minimum(np.arange(chunk_tokens), len(chunk.node_S) - 1)
        event_E = np.minimum(np.arange(max_events), num_events - 1)
        padded.append(
            _ChunkArrays(
                distribution=chunk.distribution,
                node_S=chunk.node_S[site_S],
                target_S=chunk.target_S[site_S],
                site_E=chunk.site_E[event_E],
                event_E=chunk.event_E[event_E],
                is_real_E=np.arange(max_events) < num_events,
            )
        )
    return padded


@dataclass(frozen=True, slots=True, kw_only=True)
class EventIndex:
    """Position of each trained token of an update: its sample, its position there, and its event in the rows."""

    sample_E: np.ndarray
    time_E: np.ndarray
    event_E: np.ndarray

    def gather(self, per_token: Sequence[Sequence[float | None] | np.ndarray]) -> np.ndarray:
        """Values [E] from values per sample and token; None becomes NaN."""
        flat = np.concatenate([np.zeros(0), *(read_array(values, np.float64) for values in per_token)])
        starts = np.cumsum([0, *(len(values) for values in per_token)])
        return flat[starts[self.sample_E] + self.time_E]

    def scatter(self, values_E: np.ndarray) -> np.ndarray:
        """Values [R] in the order of the rows."""
        values_R = np.empty_like(values_E)
        values_R[self.event_E] = values_E
        return values_R


def index_events(samples: Sequence[Sample], rows: Sequence[Trie]) -> EventIndex:
    """The trained tokens of the rows, ordered by trajectory, sample, time."""
    sample_R = np.concatenate([EMPTY, *(row.sample_E for row in rows)])
    time_R = np.concatenate([EMPTY, *(row.time_E for row in rows)])
    order = np.argsort([sample.trajectory_index for sample in samples], kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    event_E = np.argsort(rank[sample_R] * (time_R.max(initial=0) + 1) + time_R, kind="stable")
    return EventIndex(sample_E=sample_R[event_E], time_E=time_R[event_E], event_E=event_E)
