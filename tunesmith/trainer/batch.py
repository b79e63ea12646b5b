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

from tunesmith.experience.trie import Trie
from tunesmith.trainer.attention import TreePlan
from tunesmith.types import Distribution, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Events that are scored together."""

    distribution: Distribution
    node_S: Tensor
    """Position in the row whose hidden state predicts the token."""
    target_S: Tensor
    site_E: Tensor
    old_logprobs_E: Tensor
    advantages_E: Tensor
    weights_E: Tensor
    """Share of each event in the loss of the whole batch."""


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


def build_row(
    trie: Trie,
    samples: Sequence[Sample],
    weights_E: np.ndarray,
    *,
    chunk_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Row:
    """Tensors of one packed row; `weights_E` are those of the trie's events, `dtype` is that of logprobs."""
    events = list(zip(trie.sample_E.tolist(), trie.time_E.tolist(), strict=True))
    old_logprobs_E = np.asarray([samples[sample].logprobs[time] for sample, time in events])
    advantages_E = np.asarray([samples[sample].advantages[time] for sample, time in events])
    distributions = [samples[sample].distributions[time] or Distribution() for sample, time in events]

    def to_tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device, dtype if values.dtype.kind == "f" else torch.int64)

    chunks = tuple(
        Chunk(
            distribution=sites.distribution,
            node_S=to_tensor(sites.node_S),
            target_S=to_tensor(sites.target_S),
            site_E=to_tensor(sites.site_E),
            old_logprobs_E=to_tensor(old_logprobs_E[sites.event_E]),
            advantages_E=to_tensor(advantages_E[sites.event_E]),
            weights_E=to_tensor(weights_E[sites.event_E]),
        )
        for sites in _cut_chunks(trie, distributions, chunk_tokens)
    )
    return Row(
        input_ids_1T=to_tensor(trie.token_ids_T)[None],
        position_ids_1T=to_tensor(trie.depth_T)[None],
        plan=TreePlan(trie, device),
        chunks=chunks,
    )


def _cut_chunks(trie: Trie, distributions: Sequence[Distribution], chunk_tokens: int) -> Iterator[_Sites]:
    """Chunks of at most `chunk_tokens` sites; the events of a site stay together."""
    events_of: dict[Distribution, list[int]] = {}
    for event, distribution in enumerate(distributions):
        events_of.setdefault(distribution, []).append(event)
    num_ids = int(trie.target_E.max(initial=0)) + 1
    for distribution, events in events_of.items():
        event_E = np.asarray(events)
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
