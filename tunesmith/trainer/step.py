"""Forward, loss and backward of an update, row by row.

After the scoring pass (`scoring.py`) a token's loss depends on that token alone, so each chunk of positions goes from
hidden states to logits to loss and back at once: the logits of one chunk are all that is ever alive, and nothing is
computed twice. The gradients that the chunks leave at the hidden states then go through the body in one backward.

Axes: T tokens of the row, S sites and E events of a chunk (see `batch.py`), C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tunesmith.algorithms.algorithm import Algorithm
from tunesmith.algorithms.kl import compute_kl
from tunesmith.algorithms.losses import TokenScores
from tunesmith.algorithms.scores import TokenInputs
from tunesmith.experience.trie import Trie
from tunesmith.model.attention import run_body
from tunesmith.model.logprobs import compute_logprobs
from tunesmith.trainer.batch import Row, build_row, select_inputs
from tunesmith.trainer.compiling import compile_function
from tunesmith.types import Sample

Totals = dict[str, Tensor]
"""Quantities of trained tokens, on their device. `loss` and `pg_loss` are sums of weight times token loss; names that
begin with `max_` are maxima; all others are plain sums over tokens."""


def run_batch(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    rows: Sequence[Trie],
    algorithm: Algorithm,
    inputs: TokenInputs[np.ndarray],
    *,
    kl_coef: float,
    chunk_tokens: int,
    is_compiled: bool = False,
) -> Totals:
    """Add the update's gradient to the parameters' (not under `no_grad`) and return its totals.

    `rows` are the samples as packed; together they are one update. `inputs` are of the rows' events in turn. A GPU
    computes losses in few kernels when they are compiled.
    """
    totals, start = [], 0
    for trie in rows:
        part = slice(start, start := start + len(trie.parent_E))
        row = build_row(trie, samples, chunk_tokens=chunk_tokens, model=model)
        row_inputs = inputs.convert(itemgetter(part))
        totals.append(_run_row(model, row, algorithm, row_inputs, kl_coef, is_compiled))
    return merge_totals(totals)


def _run_row(
    model: PreTrainedModel,
    row: Row,
    algorithm: Algorithm,
    inputs: TokenInputs[np.ndarray],
    kl_coef: float,
    is_compiled: bool,
) -> Totals:
    has_backward = torch.is_grad_enabled()
    dtype = torch.promote_types(model.dtype, torch.float32)
    event_E = np.concatenate([chunk.event_E for chunk in row.chunks])
    sent = select_inputs(inputs, event_E, device=model.device, dtype=dtype)
    hidden_TC = run_body(model, row.input_ids_1T, row.position_ids_1T, row.plan)[0]
    hidden_SC = hidden_TC.index_select(0, torch.cat([chunk.node_S for chunk in row.chunks]))
    parts = hidden_SC.detach().split([len(chunk.node_S) for chunk in row.chunks])
    compute_loss = compile_function(_compute_loss) if is_compiled else _compute_loss
    totals, gradients, start = [], [], 0
    for chunk, part_SC in zip(row.chunks, parts, strict=True):
        part_SC.requires_grad_(has_backward)
        place_E = slice(start, start := start + len(chunk.event_E))
        logprobs_S, entropy_S = compute_logprobs(
            model,
            part_SC,
            chunk.target_S,
            chunk.distribution,
            chunk_tokens=len(chunk.target_S),
            with_entropy=algorithm.entropy_coef > 0,
        )
        chunk_inputs = sent.convert(itemgetter(place_E))
        loss, chunk_totals = compute_loss(logprobs_S, entropy_S, chunk.site_E, chunk_inputs, algorithm, kl_coef)
        totals.append(chunk_totals)
        if has_backward:
            loss.backward()
            gradients.append(part_SC.grad)
    if has_backward:
        hidden_SC.backward(torch.cat(gradients))
    return merge_totals(totals)


def merge_totals(parts: Sequence[Totals]) -> Totals:
    """Totals of the parts taken together."""
    stacked = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    return {name: values.amax() if name.startswith("max_") else values.sum() for name, values in stacked.items()}


def _compute_loss(
    logprobs_S: Tensor,
    entropy_S: Tensor,
    site_E: Tensor,
    inputs: TokenInputs[Tensor],
    algorithm: Algorithm,
    kl_coef: float,
) -> tuple[Tensor, Totals]:
    """A chunk's share of the update's loss, and its totals. KL and entropy are of what the policy sampled."""
    logprobs_E = logprobs_S.index_select(0, site_E)
    token_losses = algorithm.compute_losses(_build_scores(logprobs_E, inputs))
    losses_E = inputs.correction_E * token_losses.losses_N
    totals = {name: values.sum() for name, values in token_losses.metrics.items()}
    totals["entropy"] = entropy_S.detach()[site_E].sum()
    if not algorithm.is_supervised:
        totals["pg_loss"] = torch.dot(inputs.weights_E, losses_E.detach())
        totals |= _compare_with_sampler(logprobs_E.detach(), inputs)
    is_own = 1.0 if inputs.is_expert_E is None else 1 - inputs.is_expert_E
    if algorithm.entropy_coef > 0:
        losses_E = losses_E - algorithm.entropy_coef * is_own * entropy_S[site_E]
    if inputs.reference_logprobs_E is not None:
        kl_E = compute_kl(
            logprobs_E,
            inputs.reference_logprobs_E,
            estimator=algorithm.kl_estimator,
            old_logprobs_N=inputs.old_logprobs_E,
        )
        kl_E = is_own * kl_E
        losses_E = losses_E + kl_coef * kl_E
        totals["kl"] = kl_E.detach().sum()
    loss = torch.dot(inputs.weights_E, losses_E)
    totals["loss"] = loss.detach()
    return loss, totals


def _build_scores(logprobs_E: Tensor, inputs: TokenInputs[Tensor]) -> TokenScores:
    return TokenScores(
        logprobs_N=logprobs_E,
        old_logprobs_N=inputs.old_logprobs_E,
        advantages_N=inputs.advantages_E,
        sequence_log_ratios_N=inputs.sequence_log_ratios_E,
        constants_N=inputs.constants_E,
        is_expert_N=inputs.is_expert_E,
    )


def _compare_with_sampler(logprobs_E: Tensor, inputs: TokenInputs[Tensor]) -> Totals:
    """The mismatch of sampler and trainer on what the newest policy sampled."""
    is_newest_E = inputs.is_newest_E > 0
    mismatch_E = compute_kl(inputs.sampler_logprobs_E, logprobs_E, estimator="k3")
    gap_E = (logprobs_E - inputs.sampler_logprobs_E).abs()
    return {
        "mismatch_kl": mismatch_E.where(is_newest_E, 0.0).sum(),
        "max_log_ratio": gap_E.where(is_newest_E, 0.0).amax(),
        "num_newest": is_newest_E.sum().to(logprobs_E.dtype),
    }
