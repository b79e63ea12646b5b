"""The gradient of an update: from samples to accumulated gradients and sums over tokens.

    samples -> packed rows -> scores of all tokens -> terms, weights, masks -> loss pass -> gradients, totals

`score_step` computes what the updates of a step share, before the first of them moves a weight; `compute_gradient` is
one update. Both are functions of the model, the algorithm and the samples: optimizer, step counter and everything else
that outlives a step is in `Trainer`.

On several ranks each passes its own samples, and all call the same functions in the same order. Advantages, weights and
masks may depend on all tokens of the update, so the columns of all ranks are gathered and every rank computes the same
numbers (`sharding/gathered_tokens.py`). A rank without rows takes part in every collective.

Axes: E trained tokens of the update, ordered by trajectory, sample, time; R the same tokens in the order of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tunesmith.algorithms.algorithm import Algorithm
from tunesmith.algorithms.scores import Need, TokenInputs, compute_token_weights
from tunesmith.algorithms.sequence_terms import compute_correction_weights, find_top_entropy_tokens
from tunesmith.cluster.ranks import Ranks
from tunesmith.experience.samples import Trie
from tunesmith.model.experts import ROUTING
from tunesmith.trainer.batch import EventIndex, index_events
from tunesmith.trainer.layers.compiled_layers import compiled_layers
from tunesmith.trainer.layers.gradient_checkpointing import checkpointed_layers
from tunesmith.trainer.loss_pass import PassSetup, run_loss_pass
from tunesmith.trainer.metrics import (
    TokenCounts,
    Total,
    build_token_metrics,
    count_row_tokens,
    count_tokens,
    read_totals,
)
from tunesmith.trainer.scoring_pass import (
    POLICY_SCORES,
    run_scoring_passes,
    scatter_to_samples,
    score_tokens,
)
from tunesmith.trainer.sharding.gathered_tokens import gather_tokens, measure_share
from tunesmith.types import Sample

SCORE_COLUMNS: dict[Need, str] = {
    "logprobs": "logprobs_E",
    "entropies": "entropies_E",
    "reference": "reference_logprobs_E",
    "teacher": "teacher_logprobs_E",
    "values": "values_E",
}
"""Column of `TokenInputs` of each score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScores:
    """Columns of `TokenInputs` that are computed once for a step, before an update moves the policy or the critic."""

    columns: Mapping[str, Sequence[np.ndarray]] = field(default_factory=dict)
    """One array per sample, with one value per token; NaN except at trained tokens."""
    is_weighted: bool = False
    """True: losses are multiplied by truncated importance weights, and their ratio is against the proximal policy, the
    policy at the start of the step (Hilton et al., 2022); without its logprobs in `columns` they are those of the loss
    pass. False: tokens are only masked, and the ratio is against the sampling policy."""
    term_metrics: Mapping[str, float] | None = None
    """Metrics of the algorithm's terms, whose advantages and returns are in `columns`; None: each update computes its
    own terms."""

    def select(self, indices: Sequence[int]) -> StepScores:
        """The scores of some of the samples, with the metrics of the step."""
        return replace(
            self, columns={name: [arrays[index] for index in indices] for name, arrays in self.columns.items()}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedUpdate:
    """What the loss pass and the critic's update need to know of the tokens."""

    inputs: TokenInputs
    """This rank's tokens; columns are [R]."""
    counts: TokenCounts
    """Of the whole update, over all ranks."""


def score_step(
    setup: PassSetup, algorithm: Algorithm, samples: Sequence[Sample], *, policy_version: int, step: int
) -> StepScores:
    """Logprobs under the proximal policy, if the step has importance weights or a mask, and terms with a critic."""
    has_older_tokens = any(version < policy_version for version in find_versions(samples))
    is_off_policy = setup.ranks.is_any(has_older_tokens) or setup.has_separate_sampler
    is_weighted = algorithm.uses_importance_weights(has_older_tokens=is_off_policy)
    has_critic = setup.scoring_models.score_values is not None
    is_one_update = setup.settings.num_minibatches == 1 and not has_critic
    is_scored = is_weighted and not (is_one_update and algorithm.can_weigh_in_loss_pass)
    rows = setup.pack(samples) if is_scored or has_critic or algorithm.section.correction.mask is not None else []
    scores = StepScores(is_weighted=is_weighted)
    if not setup.ranks.is_any(bool(rows)):
        return scores
    with compiled_layers(*setup.compiled):
        if is_scored or algorithm.section.correction.mask is not None:
            logprobs_R, _ = score_tokens(setup.model, samples, rows, chunk_tokens=setup.chunk_tokens)
            proximal = scatter_to_samples(logprobs_R, samples, rows)
            scores = replace(scores, columns={"proximal_logprobs_E": proximal})
        return compute_step_terms(setup, algorithm, samples, rows, scores, step=step) if has_critic else scores


def compute_step_terms(
    setup: PassSetup,
    algorithm: Algorithm,
    samples: Sequence[Sample],
    rows: Sequence[Trie],
    scores: StepScores,
    *,
    step: int,
) -> StepScores:
    """Run the critic and the other models that do not change within the step; add their scores, advantages, returns."""
    events = index_events(samples, rows)
    tokens = build_inputs(setup, algorithm.needs - POLICY_SCORES, samples, rows, events, scores, step=step)
    gathered, own_E = gather_tokens(setup.ranks, tokens, find_trajectories(samples, events))
    terms = algorithm.compute_terms(gathered)
    assert terms.returns_E is not None
    scored = {name: getattr(tokens, name) for name in SCORE_COLUMNS.values() if getattr(tokens, name) is not None}
    computed = scored | {"advantages_E": terms.advantages_E[own_E], "returns_E": terms.returns_E[own_E]}
    columns = {name: scatter_to_samples(events.scatter(values_E), samples, rows) for name, values_E in computed.items()}
    return replace(scores, columns={**scores.columns, **columns}, term_metrics=terms.metrics)


def compute_gradient(
    setup: PassSetup,
    algorithm: Algorithm,
    samples: Sequence[Sample],
    rows: Sequence[Trie],
    scores: StepScores,
    *,
    policy_version: int,
    is_first: bool,
    step: int,
    dropout: AbstractContextManager[None] = nullcontext(),
    after_row: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Total[Tensor]], PreparedUpdate]:
    """Accumulate the gradient of an update on the packed samples, in the parameters or in the stream; sums over this
    rank's tokens, on the device.

    `scores` are those of its samples. `dropout` is active in the loss pass; `after_row` is called after each row.
    """
    checkpoint = checkpointed_layers if setup.settings.has_gradient_checkpointing else nullcontext
    with compiled_layers(*setup.compiled):
        prepared = prepare_update(
            setup, algorithm, samples, rows, scores, newest_version=policy_version, is_first=is_first, step=step
        )
        if (routing := getattr(setup.model, ROUTING, None)) and routing.balance_coef:
            routing.take_totals()
            score_tokens(setup.model, samples, rows, chunk_tokens=setup.chunk_tokens)
            routing.set_balance(sum(setup.ranks.all_gather_objects(routing.sums_L2E.cpu())))
        with checkpoint(setup.model), dropout:
            return run_loss_pass(setup, algorithm, samples, rows, prepared.inputs, after_row=after_row), prepared


def read_update(
    setup: PassSetup,
    algorithm: Algorithm,
    own_totals: Mapping[str, Total[Tensor]],
    prepared: PreparedUpdate,
    rows: Sequence[Trie],
    grad_norm: Tensor,
    *,
    is_first: bool,
) -> dict[str, float]:
    """Metrics of the update over all ranks, read in the only wait for the device."""
    tensors = [grad_norm, *(value for _, value in own_totals.values())]
    norm, *values = torch.stack([value.double() for value in tensors]).tolist()
    totals = read_totals(own_totals, values, setup.ranks)
    metrics = build_token_metrics(totals, prepared.counts, is_first=is_first)
    metrics |= count_row_tokens(rows, setup.ranks) | dict(prepared.inputs.metrics)
    metrics["train/grad_norm"] = norm
    if "train/kl" in totals:  # of all ranks: this one may have no rows
        metrics["train/kl_coef"] = algorithm.kl_coef
    return metrics


def prepare_update(
    setup: PassSetup,
    algorithm: Algorithm,
    samples: Sequence[Sample],
    rows: Sequence[Trie],
    scores: StepScores = StepScores(),
    *,
    newest_version: int | None = None,
    is_first: bool = False,
    step: int = 0,
) -> PreparedUpdate:
    """Run the scoring passes that the algorithm needs and fill the columns that the loss pass reads.

    The ratio in the loss is against the sampler's logprobs, which on fresh data equal those of the proximal policy up
    to rounding; with importance weights it is against the proximal policy. Sampler and trainer must agree on tokens of
    `newest_version` (None: the newest in the samples). `is_first`: no update of this step has moved the policy.
    """
    events = index_events(samples, rows)
    own = build_inputs(setup, algorithm.needs, samples, rows, events, scores, newest_version=newest_version, step=step)
    is_weighted = scores.is_weighted and "proximal_logprobs_E" in scores.columns
    is_fresh = scores.term_metrics is None and not is_weighted
    share = measure_share(setup.ranks, algorithm, own) if is_fresh else None
    ranks = setup.ranks if share is None else Ranks()
    tokens, own_E = gather_tokens(ranks, own, find_trajectories(samples, events))
    if is_first:
        assert tokens.is_newest_E is not None
        tokens = replace(tokens, is_unmoved_E=(tokens.is_newest_E > 0) | is_weighted)
    if scores.term_metrics is None:
        tokens = algorithm.compute_terms(tokens)
    else:
        tokens = replace(tokens, metrics=scores.term_metrics)
    tokens = correct_tokens(tokens, algorithm, is_weighted=is_weighted)
    weights_E = compute_weights(tokens, algorithm, norm_length=setup.norm_length)
    factor, counts = share or (1.0, count_tokens(tokens))
    caps_E = None
    if scores.is_weighted and not is_weighted:
        caps_E = np.where(tokens.find_sampled(), algorithm.section.correction.cap, 0.0)
    has_expert_column = "experts" in algorithm.needs or not tokens.find_sampled().all()
    tokens = replace(
        tokens,
        weights_E=weights_E * factor,
        importance_caps_E=caps_E,
        is_expert_E=tokens.is_expert_E if has_expert_column else None,
        reference_logprobs_E=tokens.reference_logprobs_E if algorithm.kl_coef > 0 else None,
    )
    return PreparedUpdate(inputs=tokens.convert(lambda values_E: events.scatter(values_E[own_E])), counts=counts)


def build_inputs(
    setup: PassSetup,
    needs: frozenset[Need],
    samples: Sequence[Sample],
    rows: Sequence[Trie],
    events: EventIndex,
    scores: StepScores,
    *,
    newest_version: int | None = None,
    step: int,
) -> TokenInputs:
    """This rank's tokens, with the columns of the samples, those of the step, and the scores that are still needed."""
    missing = {need for need in needs if SCORE_COLUMNS.get(need) not in scores.columns}
    scored = run_scoring_passes(
        setup.model, samples, rows, missing, scoring_models=setup.scoring_models, chunk_tokens=setup.chunk_tokens
    )
    columns: dict[str, Any] = {name: events.gather(arrays) for name, arrays in scores.columns.items()}
    columns |= {SCORE_COLUMNS[need]: values_R[events.event_E] for need, values_R in scored.items()}
    if scores.is_weighted and "proximal_logprobs_E" in columns:
        columns["old_logprobs_E"] = columns["proximal_logprobs_E"]
    return replace(read_tokens(samples, events, newest_version=newest_version, step=step), **columns)


def read_tokens(
    samples: Sequence[Sample], events: EventIndex, *, newest_version: int | None = None, step: int = 0
) -> TokenInputs:
    """What the samples say about their tokens; the sampling policy stands for the proximal and the old one."""
    sampler_E = events.gather([sample.logprobs for sample in samples])
    trajectory_E = find_trajectories(samples, events)
    is_expert_E = np.asarray([sample.is_expert for sample in samples], dtype=bool)[events.sample_E]
    version_E = events.gather([sample.policy_versions for sample in samples])
    version_E[is_expert_E] = np.nan
    newest = int(np.nanmax(version_E, initial=-1)) if newest_version is None else newest_version
    return TokenInputs(
        old_logprobs_E=sampler_E,
        sampler_logprobs_E=sampler_E,
        proximal_logprobs_E=sampler_E,
        advantages_E=events.gather([sample.advantages for sample in samples]),
        sequence_E=np.cumsum(np.diff(trajectory_E, prepend=-1) != 0) - 1,
        group_E=np.asarray([sample.group_index for sample in samples], dtype=np.int64)[events.sample_E],
        is_expert_E=is_expert_E,
        is_newest_E=(version_E == newest).astype(np.float64),
        step=step,
    )


def correct_tokens(tokens: TokenInputs, algorithm: Algorithm, *, is_weighted: bool) -> TokenInputs:
    """The tokens with importance weights and masks in their correction, and the metrics of both."""
    correction_E, metrics = compute_correction_weights(tokens, algorithm.section.correction, is_weighted=is_weighted)
    kept_E, entropy_metrics = find_top_entropy_tokens(tokens, fraction=algorithm.section.top_entropy_fraction)
    if tokens.correction_E is not None:
        correction_E = tokens.correction_E * correction_E
    return replace(tokens, correction_E=correction_E * kept_E, metrics={**tokens.metrics, **metrics, **entropy_metrics})


def compute_weights(tokens: TokenInputs, algorithm: Algorithm, *, norm_length: int) -> np.ndarray:
    """Aggregation weights [E]; expert tokens are aggregated separately."""
    weigh = partial(compute_token_weights, aggregation=algorithm.aggregation, norm_length=norm_length)
    is_sampled_E = tokens.find_sampled()
    if is_sampled_E.all():
        return weigh(tokens.sequence_E)
    weights_E = np.zeros(len(is_sampled_E))
    for is_kind_E in (~is_sampled_E, is_sampled_E):
        weights_E[is_kind_E] = weigh(tokens.sequence_E[is_kind_E])
    return weights_E


def find_trajectories(samples: Sequence[Sample], events: EventIndex) -> np.ndarray:
    """The trajectory [E] of each event."""
    return np.asarray([sample.trajectory_index for sample in samples], dtype=np.int64)[events.sample_E]


def gather_versions(samples: Sequence[Sample], ranks: Ranks, newest: int | None) -> tuple[int, list[int] | None]:
    """The newest policy version of a step, and the groups of its samples; no groups on a single rank.

    `newest` is the version if it is known, the same on all ranks; else it is that of all ranks' samples, 0 without any.
    """
    found = max(find_versions(samples), default=0) if newest is None else newest
    if ranks.is_alone:
        return found, None
    gathered = ranks.all_gather_objects((found, [sample.group_index for sample in samples]))
    return max(each for each, _ in gathered), sorted({group for _, part in gathered for group in part})


def find_versions(samples: Sequence[Sample]) -> set[int]:
    """Policy versions that sampled tokens of the samples."""
    own = [sample for sample in samples if not sample.is_expert]
    return {version for sample in own for version in sample.policy_versions if version is not None}
