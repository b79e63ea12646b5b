"""Forward, loss and backward of a batch, row by row.

A token's loss depends on the scores of that token alone, so each chunk of positions goes from hidden states to logits
to loss and back at once: the logits of one chunk are all that is ever alive, and nothing is computed twice. The
gradients that the chunks leave at the hidden states then go through the body in one backward.

Axes: T tokens of the row, S sites and E events of a chunk (see `batch.py`), C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tunesmith.algorithms.aggregate import compute_token_weights
from tunesmith.algorithms.kl import compute_kl
from tunesmith.algorithms.losses import TokenScores
from tunesmith.algorithms.table import Algorithm
from tunesmith.experience.trie import Trie
from tunesmith.model.attention import run_body
from tunesmith.model.logprobs import compute_logprobs
from tunesmith.trainer.batch import Chunk, Row, build_row
from tunesmith.types import Sample

Totals = dict[str, Tensor]
"""Quantities of trained tokens, on their device. `loss` and `pg_loss` are sums of weight times token loss; names that
begin with `max_` are maxima; all others are plain sums over tokens."""


def run_batch(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    rows: Sequence[Trie],
    algorithm: Algorithm,
    *,
    norm_length: int,
    chunk_tokens: int,
    reference_model: PreTrainedModel | None = None,
    collect_gradients: Callable[[], None] = lambda: None,
) -> Totals:
    """Add the batch's gradient to the parameters' (not under `no_grad`) and return its totals.

    `rows` are the samples as packed; together they are one batch. `collect_gradients` is called after each backward.
    """
    trajectories = [np.asarray([samples[index].trajectory_index for index in row.sample_E]) for row in rows]
    weights_E = compute_token_weights(
        np.concatenate(trajectories), aggregation=algorithm.aggregation, norm_length=norm_length
    )
    ends = np.cumsum([len(row.parent_E) for row in rows])
    totals = []
    for trie, row_weights_E in zip(rows, np.split(weights_E, ends[:-1]), strict=True):
        row = build_row(
            trie,
            samples,
            row_weights_E,
            chunk_tokens=chunk_tokens,
            device=model.device,
            dtype=torch.promote_types(model.dtype, torch.float32),
        )
        totals.append(_run_row(model, row, algorithm, reference_model, collect_gradients))
    return merge_totals(totals)


def _run_row(
    model: PreTrainedModel,
    row: Row,
    algorithm: Algorithm,
    reference_model: PreTrainedModel | None,
    collect_gradients: Callable[[], None],
) -> Totals:
    has_backward = torch.is_grad_enabled()
    hidden_TC = run_body(model, row.input_ids_1T, row.position_ids_1T, row.plan)[0]
    hidden_SC = hidden_TC.index_select(0, torch.cat([chunk.node_S for chunk in row.chunks]))
    parts = hidden_SC.detach().split([len(chunk.node_S) for chunk in row.chunks])
    reference_logprobs = _score_reference(reference_model, row) if reference_model is not None else None
    totals, gradients = [], []
    for index, (chunk, part_SC) in enumerate(zip(row.chunks, parts, strict=True)):
        part_SC.requires_grad_(has_backward)
        reference_S = None if reference_logprobs is None else reference_logprobs[index]
        loss, chunk_totals = _run_chunk(model, part_SC, chunk, algorithm, reference_S)
        totals.append(chunk_totals)
        if has_backward:
            loss.backward()
            gradients.append(part_SC.grad)
            collect_gradients()
    if has_backward:
        hidden_SC.backward(torch.cat(gradients))
        collect_gradients()
    return merge_totals(totals)


def merge_totals(parts: Sequence[Totals]) -> Totals:
    """Totals of the parts taken together."""
    stacked = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    return {name: values.amax() if name.startswith("max_") else values.sum() for name, values in stacked.items()}


def _run_chunk(
    model: PreTrainedModel, hidden_SC: Tensor, chunk: Chunk, algorithm: Algorithm, reference_S: Tensor | None
) -> tuple[Tensor, Totals]:
    """The chunk's share of the batch's loss, and its totals."""
    has_bonus = algorithm.entropy_coef > 0
    logprobs_S, entropy_S = _score(model, hidden_SC, chunk, with_entropy=has_bonus)
    logprobs_E = logprobs_S.index_select(0, chunk.site_E)
    scores = TokenScores(logprobs_N=logprobs_E, old_logprobs_N=chunk.old_logprobs_E, advantages_N=chunk.advantages_E)
    token_losses = algorithm.compute_losses(scores)
    losses_E = token_losses.losses_N
    totals = {name: values.sum() for name, values in token_losses.metrics.items()}
    totals["entropy"] = entropy_S.detach()[chunk.site_E].sum()
    if not algorithm.is_supervised:
        totals["pg_loss"] = torch.dot(chunk.weights_E, losses_E.detach())
        totals |= _compare_with_sampler(logprobs_E.detach(), chunk.old_logprobs_E)
    if has_bonus:
        losses_E = losses_E - algorithm.entropy_coef * entropy_S[chunk.site_E]
    if reference_S is not None:
        kl_E = compute_kl(logprobs_E, reference_S[chunk.site_E], estimator=algorithm.kl_estimator)
        losses_E = losses_E + algorithm.kl_coef * kl_E
        totals["kl"] = kl_E.detach().sum()
    loss = torch.dot(chunk.weights_E, losses_E)
    totals["loss"] = loss.detach()
    return loss, totals


def _compare_with_sampler(logprobs_E: Tensor, sampler_logprobs_E: Tensor) -> Totals:
    mismatch_E = compute_kl(sampler_logprobs_E, logprobs_E, estimator="k3")
    return {"mismatch_kl": mismatch_E.sum(), "max_log_ratio": (logprobs_E - sampler_logprobs_E).abs().amax()}


@torch.no_grad()
def _score_reference(model: PreTrainedModel, row: Row) -> list[Tensor]:
    """Logprobs under the reference model, by chunk."""
    hidden_TC = run_body(model, row.input_ids_1T, row.position_ids_1T, row.plan)[0]
    return [_score(model, hidden_TC[chunk.node_S], chunk)[0] for chunk in row.chunks]


def _score(
    model: PreTrainedModel, hidden_SC: Tensor, chunk: Chunk, *, with_entropy: bool = False
) -> tuple[Tensor, Tensor]:
    return compute_logprobs(
        model,
        hidden_SC,
        chunk.target_S,
        chunk.distribution,
        chunk_tokens=len(chunk.target_S),
        with_entropy=with_entropy,
    )
