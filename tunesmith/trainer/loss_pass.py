"""The loss pass: forward, loss and backward of an update, row by row.

After the scoring pass (`scoring_pass.py`) the loss of a token depends on that token alone. So forward and backward of
the head run chunk by chunk: only the logits of one chunk are in memory, and nothing is recomputed. The gradients of the
hidden states, collected over chunks, then go through the body in one backward.

Axes: T tokens of the row, S sites and N events of a chunk (see `batch.py`), C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tunesmith.algorithms.algorithm import Algorithm
from tunesmith.algorithms.kl import MAX_LOG_RATIO, compute_kl
from tunesmith.algorithms.scores import TokenInputs
from tunesmith.cluster.ranks import Ranks
from tunesmith.config import TrainerSection
from tunesmith.experience.samples import Trie
from tunesmith.model.experts import ROUTING
from tunesmith.model.forward.attention import run_body
from tunesmith.model.forward.logprobs import compute_logprobs
from tunesmith.trainer.batch import (
    ChunkScores,
    DeviceInputs,
    PackedRow,
    build_row,
    copy_inputs_to_device,
    index_distributions,
    routed,
)
from tunesmith.trainer.layers.compiled_layers import compile_function
from tunesmith.trainer.layers.row_graphs import RowGraphs, can_replay
from tunesmith.trainer.layers.weight_gradients import accumulated_weight_grads
from tunesmith.trainer.metrics import PartTotals, Reduction, Total, add_parts
from tunesmith.trainer.packing import pack_samples
from tunesmith.trainer.scoring_pass import ScoringModels
from tunesmith.trainer.sharding.matched_rows import match_rows
from tunesmith.trainer.sharding.streamed_gradients import StreamedGradients
from tunesmith.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSetup:
    """What the passes of all updates run on."""

    model: PreTrainedModel
    settings: TrainerSection = field(default_factory=TrainerSection)
    norm_length: int = 1
    """The constant of the aggregation `seq-mean-token-sum-norm`."""
    chunk_tokens: int
    scoring_models: ScoringModels = field(default_factory=ScoringModels)
    has_separate_sampler: bool = False
    """Every token is off-policy: the sampler has other weights or another implementation."""
    compiled: Sequence[PreTrainedModel] = ()
    """Models whose layers run compiled."""
    graphs: RowGraphs | None = None
    """Replays rows as CUDA graphs where possible."""
    stream: StreamedGradients | None = None
    """Sums gradients over ranks after each row."""
    ranks: Ranks = field(default_factory=Ranks)

    def pack(self, samples: Sequence[Sample]) -> list[Trie]:
        return pack_samples(
            samples,
            max_tokens_per_row=self.settings.max_tokens_per_row,
            has_prefix_sharing=self.settings.has_prefix_sharing,
            hidden_size=int(self.model.config.get_text_config().hidden_size),
        )


def run_loss_pass(
    setup: PassSetup,
    algorithm: Algorithm,
    samples: Sequence[Sample],
    rows: Sequence[Trie],
    inputs: TokenInputs,
    *,
    after_row: Callable[[], None] = lambda: None,
) -> dict[str, Total[Tensor]]:
    """Accumulate the gradient of the update (no gradient under `no_grad`) and return its totals, {} without rows.

    `rows` are the packed samples of one update; `inputs` are concatenated over their events. `after_row` is called when
    the device has a row to compute, or takes part in one of another rank.
    """
    model, has_gradient = setup.model, torch.is_grad_enabled()
    graphs, stream = (setup.graphs, setup.stream) if has_gradient else (None, None)
    match_rows(model, len(rows), after_row)
    if routing := getattr(model, ROUTING, None):
        routing.take_totals()
    if stream is not None:
        stream.begin_update(len(rows))
    if graphs is not None:
        graphs.begin_update()
    parts: list[PartTotals] = []
    start = 0
    dtype = torch.promote_types(model.dtype, torch.float32)
    kl_coef = torch.full((), algorithm.kl_coef, device=model.device, dtype=dtype)
    run = partial(run_row, model, algorithm=algorithm, is_compiled=bool(setup.compiled))
    with accumulated_weight_grads(model) if rows and has_gradient else nullcontext():
        for trie in rows:
            part = slice(start, start := start + len(trie.parent_E))
            distributions = index_distributions(samples, trie)
            is_padded = graphs is not None and can_replay(trie, distributions)
            row = build_row(trie, distributions, chunk_tokens=setup.chunk_tokens, model=model, is_padded=is_padded)
            row_inputs = inputs.convert(itemgetter(part))
            device_inputs = copy_inputs_to_device(row_inputs, row, device=model.device, dtype=dtype)
            with routed(model, samples, trie, row):
                if graphs is not None and is_padded:
                    parts.append(graphs.run(row, device_inputs, kl_coef, run))
                else:
                    parts.append(run(row, device_inputs, kl_coef))
            if stream is not None:
                stream.end_row()
            after_row()
    if stream is not None:
        stream.end_update(after_row)
    if graphs is not None:
        graphs.end_update()
    routed_totals = routing.take_totals() if routing and has_gradient else {}
    return add_parts(parts) | routed_totals if parts else {}


def run_row(
    model: PreTrainedModel,
    row: PackedRow,
    device_inputs: DeviceInputs,
    kl_coef: Tensor,
    *,
    algorithm: Algorithm,
    is_compiled: bool,
) -> PartTotals:
    """Accumulate the gradient of a row; return the totals of its chunks."""
    has_backward = torch.is_grad_enabled()
    hidden_TC = run_body(model, row.input_ids_1T, row.position_ids_1T, row.plan)[0]
    hidden_SC = hidden_TC.index_select(0, row.node_S)
    parts = hidden_SC.detach().split([len(chunk.node_S) for chunk in row.chunks])
    totals, gradients, start = [], [], 0
    reductions: tuple[tuple[str, Reduction], ...] = ()
    for chunk, part_SC in zip(row.chunks, parts, strict=True):
        part_SC.requires_grad_(has_backward)
        event_slice = slice(start, start := start + len(chunk.event_E))
        scores = compute_logprobs(
            model,
            part_SC,
            chunk.target_S,
            chunk.distribution,
            chunk_tokens=len(chunk.target_S),
            with_entropy=algorithm.section.entropy_coef > 0,
            adjustment=chunk.adjustment,
        )
        can_compile = is_compiled and min(len(chunk.target_S), len(chunk.event_E)) > 1
        compute = compile_function(compute_chunk_loss) if can_compile else compute_chunk_loss
        loss, reductions, totals_K = compute(
            *scores, chunk.site_E, device_inputs.select(event_slice), algorithm, kl_coef
        )
        totals.append(totals_K)
        if has_backward:
            loss.backward()
            gradients.append(part_SC.grad)
    if hidden_SC.requires_grad:  # not below an adapter of the head alone
        hidden_SC.backward(torch.cat(gradients))
    return PartTotals(reductions=reductions, values_PK=torch.stack(totals))


def compute_chunk_loss(
    logprobs_S: Tensor,
    entropy_S: Tensor,
    site_N: Tensor,
    device_inputs: DeviceInputs,
    algorithm: Algorithm,
    kl_coef: Tensor,
) -> tuple[Tensor, tuple[tuple[str, Reduction], ...], Tensor]:
    """The loss of a chunk (its terms of the update's sum), names and reductions of its totals, and the totals [K].

    Expert tokens have no KL and no entropy. `kl_coef` is that of the algorithm, as a tensor, so that a captured row can
    be replayed with another value.
    """
    columns = dict(zip(device_inputs.names, device_inputs.values_FE.unbind(), strict=True))
    logprobs_N = logprobs_S.index_select(0, site_N)
    if "importance_caps_N" in columns:  # the policy of this pass is the proximal one
        columns["old_logprobs_N"] = logprobs_N.detach()
    scores = ChunkScores(logprobs_N=logprobs_N, **columns)
    correction_N = scores.correction_N
    weights: dict[str, Tensor] = {}
    if scores.importance_caps_N is not None:
        weights_N, weights = _compute_importance_weights(
            scores, scores.importance_caps_N, floor=algorithm.section.correction.floor
        )
        correction_N = correction_N * weights_N
    token_losses = algorithm.compute_losses(scores)
    losses_N = correction_N * token_losses.losses_N
    is_sampled = 1.0 if scores.is_expert_N is None else 1 - scores.is_expert_N
    per_token = {f"train/{name}": values_N for name, values_N in token_losses.metrics.items()}
    per_token |= {"train/entropy": entropy_S.detach()[site_N], **weights}
    totals: dict[str, Total[Tensor]] = {
        name: ("sampled_mean", _sum_real(is_sampled * values_N, scores)) for name, values_N in per_token.items()
    }
    if not algorithm.is_supervised:
        totals["train/pg_loss"] = ("sum", torch.dot(scores.weights_N, losses_N.detach()))
        totals |= _compute_mismatch(logprobs_N.detach(), scores)
    if algorithm.section.entropy_coef > 0:
        losses_N = losses_N - algorithm.section.entropy_coef * is_sampled * entropy_S[site_N]
    if scores.reference_logprobs_N is not None:
        kl_N = is_sampled * compute_kl(
            logprobs_N,
            scores.reference_logprobs_N,
            estimator=algorithm.section.kl_estimator,
            sampler_logprobs_N=scores.sampler_logprobs_N,
        )
        losses_N = losses_N + kl_coef * kl_N
        totals["train/kl"] = ("sampled_mean", _sum_real(kl_N.detach(), scores))
    loss = torch.dot(scores.weights_N, losses_N)
    totals["train/loss"] = ("sum", loss.detach())
    reductions = tuple((name, reduction) for name, (reduction, _) in totals.items())
    return loss, reductions, torch.stack([total for _, total in totals.values()])


def _sum_real(values_N: Tensor, scores: ChunkScores) -> Tensor:
    return values_N.sum() if scores.is_real_N is None else values_N.where(scores.is_real_N > 0, 0.0).sum()


def _compute_importance_weights(
    scores: ChunkScores, caps_N: Tensor, *, floor: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Truncated importance weights as in `compute_correction_weights`, and the tokens' metrics."""
    log_ratio_N = (scores.old_logprobs_N - scores.sampler_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_N = log_ratio_N.where(caps_N > 0, 0.0).exp()
    weights_N = torch.minimum(ratio_N, caps_N.where(caps_N > 0, 1.0)).clamp(min=floor)
    metrics = {
        "correction/mean_weight": weights_N,
        "correction/truncated_frac": (ratio_N > weights_N).to(ratio_N.dtype),
    }
    if floor > 0:
        metrics["correction/raised_frac"] = (ratio_N < weights_N).to(ratio_N.dtype)
    return weights_N, metrics


def _compute_mismatch(logprobs_N: Tensor, scores: ChunkScores) -> dict[str, Total[Tensor]]:
    """Mismatch of sampler and trainer logprobs on the tokens that the newest policy sampled."""
    is_newest_N = scores.is_newest_N > 0
    mismatch_N = compute_kl(scores.sampler_logprobs_N, logprobs_N, estimator="k3")
    log_ratio_N = (logprobs_N - scores.sampler_logprobs_N).abs()
    return {
        "mismatch/kl": ("newest_mean", mismatch_N.where(is_newest_N, 0.0).sum()),
        "mismatch/max_log_ratio": ("newest_max", log_ratio_N.where(is_newest_N, 0.0).amax()),
    }
