"""Forward, loss and backward of an update, row by row.

After the scoring pass (`scoring.py`) a token's loss depends on that token alone, so each chunk of positions goes from
hidden states to logits to loss and back at once: the logits of one chunk are all that is ever alive, and nothing is
computed twice. The gradients that the chunks leave at the hidden states then go through the body in one backward.

Axes: T tokens of the row, S sites and E events of a chunk (see `batch.py`), C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tunesmith.algorithms.algorithm import Algorithm
from tunesmith.algorithms.kl import compute_kl
from tunesmith.algorithms.losses.clipped import TokenScores
from tunesmith.algorithms.scores import TokenInputs
from tunesmith.experience.trie import Trie
from tunesmith.model.forward.attention import run_body
from tunesmith.model.forward.logprobs import compute_logprobs
from tunesmith.trainer.batch import Row, SentInputs, build_row, number_distributions, send_inputs
from tunesmith.trainer.compiled_layers import compile_function
from tunesmith.trainer.metrics import Kind, PartTotals, Total, add_parts
from tunesmith.trainer.row_graphs import RowGraphs, can_replay
from tunesmith.types import Sample

ChunkTotals = dict[str, tuple[Kind, Tensor]]
"""Of a chunk, by the name of the metric."""


def run_batch(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    rows: Sequence[Trie],
    algorithm: Algorithm,
    inputs: TokenInputs[np.ndarray],
    *,
    chunk_tokens: int,
    is_compiled: bool = False,
    graphs: RowGraphs | None = None,
) -> dict[str, Total]:
    """Add the update's gradient to the parameters' (not under `no_grad`) and return its totals.

    `rows` are the samples as packed; together they are one update. `inputs` are of the rows' events in turn. A GPU
    computes losses in few kernels when they are compiled, and launches rows at once where they have `graphs`.
    """
    if graphs is not None:
        graphs.begin_update()
    parts: list[PartTotals] = []
    start = 0
    dtype = torch.promote_types(model.dtype, torch.float32)
    kl_coef = torch.full((), algorithm.kl_coef, device=model.device, dtype=dtype)
    for trie in rows:
        part = slice(start, start := start + len(trie.parent_E))
        kinds = number_distributions(samples, trie)
        is_rounded = graphs is not None and can_replay(trie, kinds)
        row = build_row(trie, kinds, chunk_tokens=chunk_tokens, model=model, is_rounded=is_rounded)
        sent = send_inputs(inputs.convert(itemgetter(part)), row, device=model.device, dtype=dtype)
        run = partial(run_row, model, algorithm=algorithm, is_compiled=is_compiled)
        if graphs is not None and is_rounded:
            parts.append(graphs.run(row, sent, kl_coef, run))
        else:
            parts.append(run(row, sent, kl_coef))
    if graphs is not None:
        graphs.end_update()
    return add_parts(parts)


def run_row(
    model: PreTrainedModel,
    row: Row,
    sent: SentInputs,
    kl_coef: Tensor,
    *,
    algorithm: Algorithm,
    is_compiled: bool,
) -> PartTotals:
    """Add a row's gradient to the parameters'; the totals are of its chunks."""
    has_backward = torch.is_grad_enabled()
    hidden_TC = run_body(model, row.input_ids_1T, row.position_ids_1T, row.plan)[0]
    hidden_SC = hidden_TC.index_select(0, row.node_S)
    parts = hidden_SC.detach().split([len(chunk.node_S) for chunk in row.chunks])
    totals, gradients, start = [], [], 0
    kinds: tuple[tuple[str, Kind], ...] = ()
    for chunk, part_SC in zip(row.chunks, parts, strict=True):
        part_SC.requires_grad_(has_backward)
        place_E = slice(start, start := start + len(chunk.event_E))
        scores = compute_logprobs(
            model,
            part_SC,
            chunk.target_S,
            chunk.distribution,
            chunk_tokens=len(chunk.target_S),
            with_entropy=algorithm.entropy_coef > 0,
        )
        can_compile = is_compiled and min(len(chunk.target_S), len(chunk.event_E)) > 1
        measure = compile_function(measure_loss) if can_compile else measure_loss
        loss, kinds, totals_K = measure(*scores, chunk.site_E, sent.select(place_E), algorithm, kl_coef)
        totals.append(totals_K)
        if has_backward:
            loss.backward()
            gradients.append(part_SC.grad)
    if has_backward:
        hidden_SC.backward(torch.cat(gradients))
    return PartTotals(kinds=kinds, values_PK=torch.stack(totals))


def measure_loss(
    logprobs_S: Tensor,
    entropy_S: Tensor,
    site_E: Tensor,
    sent: SentInputs,
    algorithm: Algorithm,
    kl_coef: Tensor,
) -> tuple[Tensor, tuple[tuple[str, Kind], ...], Tensor]:
    """A chunk's share of the update's loss, and its totals [K] with their names and kinds."""
    loss, totals = _compute_loss(logprobs_S, entropy_S, site_E, sent.unstack(), algorithm, kl_coef)
    kinds = tuple((name, kind) for name, (kind, _) in totals.items())
    return loss, kinds, torch.stack([total for _, total in totals.values()])


def _compute_loss(
    logprobs_S: Tensor,
    entropy_S: Tensor,
    site_E: Tensor,
    inputs: TokenInputs[Tensor],
    algorithm: Algorithm,
    kl_coef: Tensor,
) -> tuple[Tensor, ChunkTotals]:
    """A chunk's share of the update's loss, and its totals. KL and entropy are of what the policy sampled.

    `kl_coef` is the algorithm's, as a tensor that a recorded row can be given anew.
    """
    logprobs_E = logprobs_S.index_select(0, site_E)
    token_losses = algorithm.compute_losses(_build_scores(logprobs_E, inputs))
    losses_E = inputs.correction_E * token_losses.losses_N
    is_own = 1.0 if inputs.is_expert_E is None else 1 - inputs.is_expert_E
    per_token = {**token_losses.metrics, "entropy": entropy_S.detach()[site_E]}
    totals: ChunkTotals = {
        f"train/{name}": ("own", _sum_real(is_own * values_E, inputs)) for name, values_E in per_token.items()
    }
    if not algorithm.is_supervised:
        totals["train/pg_loss"] = ("loss", torch.dot(inputs.weights_E, losses_E.detach()))
        totals |= _compare_with_sampler(logprobs_E.detach(), inputs)
    if algorithm.entropy_coef > 0:
        losses_E = losses_E - algorithm.entropy_coef * is_own * entropy_S[site_E]
    if inputs.reference_logprobs_E is not None:
        kl_E = compute_kl(
            logprobs_E,
            inputs.reference_logprobs_E,
            estimator=algorithm.kl_estimator,
            sampler_logprobs_N=inputs.sampler_logprobs_E,
        )
        kl_E = is_own * kl_E
        losses_E = losses_E + kl_coef * kl_E
        totals["train/kl"] = ("own", _sum_real(kl_E.detach(), inputs))
    loss = torch.dot(inputs.weights_E, losses_E)
    totals["train/loss"] = ("loss", loss.detach())
    return loss, totals


def _sum_real(values_E: Tensor, inputs: TokenInputs[Tensor]) -> Tensor:
    return values_E.sum() if inputs.is_real_E is None else values_E.where(inputs.is_real_E > 0, 0.0).sum()


def _build_scores(logprobs_E: Tensor, inputs: TokenInputs[Tensor]) -> TokenScores:
    return TokenScores(
        logprobs_N=logprobs_E,
        old_logprobs_N=inputs.old_logprobs_E,
        advantages_N=inputs.advantages_E,
        sequence_log_ratios_N=inputs.sequence_log_ratios_E,
        constants_N=inputs.constants_E,
        is_expert_N=inputs.is_expert_E,
    )


def _compare_with_sampler(logprobs_E: Tensor, inputs: TokenInputs[Tensor]) -> ChunkTotals:
    """The mismatch of sampler and trainer on what the newest policy sampled."""
    is_newest_E = inputs.is_newest_E > 0
    mismatch_E = compute_kl(inputs.sampler_logprobs_E, logprobs_E, estimator="k3")
    gap_E = (logprobs_E - inputs.sampler_logprobs_E).abs()
    return {
        "mismatch/kl": ("newest", mismatch_E.where(is_newest_E, 0.0).sum()),
        "mismatch/max_log_ratio": ("largest_newest", gap_E.where(is_newest_E, 0.0).amax()),
    }
