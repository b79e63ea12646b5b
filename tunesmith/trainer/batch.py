"""Rows as tensors: here, and nowhere earlier, samples become tensors.

The trained events of a row are cut into chunks of one sampling distribution each. Within a chunk, events that predict
the same token from the same node are one site: it is scored once.

Axes: T tokens of a row, S sites of a chunk, E events of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tunesmith.algorithms.scores import TokenInputs
from tunesmith.experience.trie import Trie
from tunesmith.trainer.attention import TreePlan, describe_attention
from tunesmith.trainer.tiles import pad_trie
from tunesmith.types import Distribution, Sample

UNTEMPERED = Distribution()
"""Of tokens whose sampling is not known."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sites:
    """Sites of one chunk, and which of the row's events they score."""

    distribution: Distribution
    node_S: np.ndarray
    target_S: np.ndarray
    site_E: np.ndarray
    event_E: np.ndarray


def build_row(trie: Trie, samples: Sequence[Sample], *, chunk_tokens: int, model: PreTrainedModel) -> Row:
    """Tensors of one packed row for the model; on a GPU the row is filled up to whole tiles."""
    events = zip(trie.sample_E.tolist(), trie.time_E.tolist(), strict=True)
    distributions = [samples[sample].distributions[time] or UNTEMPERED for sample, time in events]
    sites = list(_cut_chunks(trie, distributions, chunk_tokens))
    nodes = _send_parts([part.node_S for part in sites], model.device)
    targets = _send_parts([part.target_S for part in sites], model.device)
    places = _send_parts([part.site_E for part in sites], model.device)
    chunks = tuple(
        Chunk(distribution=part.distribution, node_S=node_S, target_S=target_S, site_E=site_E, event_E=part.event_E)
        for part, node_S, target_S, site_E in zip(sites, nodes, targets, places, strict=True)
    )
    filled = pad_trie(trie) if model.device.type == "cuda" else trie
    return Row(
        input_ids_1T=send(filled.token_ids_T, model.device)[None],
        position_ids_1T=send(filled.depth_T, model.device)[None],
        plan=TreePlan(trie, model.device, **describe_attention(model)),
        chunks=chunks,
    )


def send(values: np.ndarray, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """The values as a tensor; on their way to a GPU nobody waits for them."""
    tensor = torch.from_numpy(values).to(dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _send_parts(parts: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, ...]:
    """Integers of several chunks, sent together."""
    return send(np.concatenate(parts), device).split([len(part) for part in parts])


def select_inputs(
    inputs: TokenInputs[np.ndarray], event_E: np.ndarray, *, device: torch.device, dtype: torch.dtype
) -> TokenInputs[Tensor]:
    """What the chosen events are given, in the type of logprobs."""
    return inputs.convert(lambda values: send(values[event_E].astype(np.float64), device, dtype))


def _cut_chunks(trie: Trie, distributions: Sequence[Distribution], chunk_tokens: int) -> Iterator[_Sites]:
    """Chunks of at most `chunk_tokens` sites; the events of a site stay together."""
    kinds, kind_E = _number_distributions(distributions)
    num_ids = int(trie.target_E.max(initial=0)) + 1
    for kind, distribution in enumerate(kinds):
        event_E = np.flatnonzero(kind_E == kind)
        key_E = trie.parent_E[event_E] * num_ids + trie.target_E[event_E]
        key_S, site_E = np.unique(key_E, return_inverse=True)
        order_E = np.argsort(site_E, kind="stable")
        event_E, site_E = event_E[order_E], site_E[order_E]
        for first in range(0, len(key_S), chunk_tokens):
            start, end = np.searchsorted(site_E, [first, first + chunk_tokens])
            yield _Sites(
                distribution=distribution,
                node_S=key_S[first : first + chunk_tokens] // num_ids,
                target_S=key_S[first : first + chunk_tokens] % num_ids,
                site_E=site_E[start:end] - first,
                event_E=event_E[start:end],
            )


def _number_distributions(distributions: Sequence[Distribution]) -> tuple[list[Distribution], np.ndarray]:
    """The different distributions, and which of them each event has; one object is hashed once."""
    kind_of: dict[Distribution, int] = {}
    kind_of_object: dict[int, int] = {}
    for distribution in distributions:
        if id(distribution) not in kind_of_object:
            kind_of_object[id(distribution)] = kind_of.setdefault(distribution, len(kind_of))
    return list(kind_of), np.asarray([kind_of_object[id(distribution)] for distribution in distributions])
