"""The scoring pass, and the per-token inputs of the loss pass.

If the algorithm needs it, all rows of an update run once without gradients, for one number per trained token: its
logprob under the current policy, the reference or the teacher, the policy's entropy, or the critic's value. Pure
functions over all tokens of the update then compute advantages and weights. The loss of a token depends on that token
alone, so the result does not depend on rows and chunks.

Axes: R trained events in the order of the rows, E the same tokens ordered by sequence, sample, time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from tunesmith.algorithms.aggregation import compute_token_weights
from tunesmith.algorithms.algorithm import Algorithm
from tunesmith.algorithms.corrections import compute_correction_weights
from tunesmith.algorithms.scores import BatchScores, Need, TokenInputs, TokenTerms
from tunesmith.algorithms.token_selection import find_top_entropy_tokens
from tunesmith.cluster.ranks import Ranks
from tunesmith.experience.trie import Trie
from tunesmith.model.forward.attention import run_body
from tunesmith.model.forward.logprobs import compute_logprobs
from tunesmith.trainer.batch import EventIndex, build_row, index_distributions, index_events
from tunesmith.trainer.metrics import TokenCounts, count_tokens
from tunesmith.trainer.policy_versions import find_newest
from tunesmith.trainer.reference import Reference, reference_weights
from tunesmith.trainer.sharding.gathered_scores import gather_scores
from tunesmith.trainer.sharding.matched_rows import match_rows
from tunesmith.trainer.sharding.update_share import measure_share
from tunesmith.types import Sample

POLICY_SCORES: frozenset[Need] = frozenset({"logprobs", "entropies"})
"""Scores of the current policy, which change with every update."""
ScoreRows = Callable[[Sequence[Trie]], np.ndarray]
"""One number [R] for each event, concatenated over rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringModels:
    """Extra models that score the policy's tokens; None if the algorithm does not need the model."""

    reference: PreTrainedModel | None = None
    """Scored with its adapter disabled: the policy itself can serve as the reference of its base model."""
    reference_state: Reference | None = None
    """Holds the adapter with which the reference is scored instead, once it was refreshed."""
    teacher: PreTrainedModel | None = None
    score_values: ScoreRows | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProximalScores:
    """Logprobs under the proximal policy: the policy at the start of the step (Hilton et al., 2022)."""

    logprobs: Sequence[np.ndarray] | None
    """Per sample and token; NaN except at trained tokens. None: those of the loss pass (`can_weigh_in_loss_pass`)."""
    is_weighted: bool
    """True: losses are multiplied by truncated importance weights, and their ratio is against the proximal policy.
    False: tokens are only masked, and the ratio is against the sampling policy."""

    def select(self, indices: Sequence[int]) -> ProximalScores:
        """The scores of some of the samples."""
        chosen = None if self.logprobs is None else [self.logprobs[index] for index in indices]
        return ProximalScores(logprobs=chosen, is_weighted=self.is_weighted)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTerms:
    """Values, advantages and returns of a step, computed before its first update moves the critic.

    Arrays are per sample and token; NaN except at trained tokens.
    """

    scores: Mapping[Need, Sequence[np.ndarray]]
    """Values, and the other scores that do not change within the step."""
    advantages: Sequence[np.ndarray]
    returns: Sequence[np.ndarray]
    metrics: dict[str, float]

    def select(self, indices: Sequence[int]) -> StepTerms:
        """The terms of some of the samples, with the metrics of the step."""
        return StepTerms(
            scores={need: [arrays[index] for index in indices] for need, arrays in self.scores.items()},
            advantages=[self.advantages[index] for index in indices],
            returns=[self.returns[index] for index in indices],
            metrics=self.metrics,
        )

    def replace_terms(self, columns: Mapping[str, np.ndarray]) -> TokenTerms:
        """The terms of an update, whose advantages and returns [E] are given."""
        return TokenTerms(
            advantages_E=columns["advantages"],
            weights_E=np.ones(len(columns["advantages"])),
            returns_E=columns["returns"],
            metrics=self.metrics,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedUpdate:
    """Inputs of the loss pass and of the critic's update."""

    inputs: TokenInputs[np.ndarray]
    """Arrays are [R]."""
    metrics: dict[str, float]
    values_R: np.ndarray | None
    """Values by the critic: before the first update of the step where `StepTerms` were passed, else now."""
    returns_R: np.ndarray | None
    """Targets of the critic."""
    counts: TokenCounts
    """Of the whole update, over all ranks."""


def prepare_update(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    rows: Sequence[Trie],
    algorithm: Algorithm,
    *,
    norm_length: int,
    chunk_tokens: int,
    scoring_models: ScoringModels = ScoringModels(),
    proximal: ProximalScores | None = None,
    step_terms: StepTerms | None = None,
    newest_version: int | None = None,
    is_first: bool = False,
    step: int = 0,
    ranks: Ranks = Ranks(),
) -> PreparedUpdate:
    """Run the scoring passes that the algorithm needs and compute the inputs of every trained token.

    The ratio in the loss is against the sampler's logprobs, which on fresh data equal those of the proximal policy up
    to rounding; with `proximal.is_weighted` it is against the proximal policy. `step_terms` replaces `compute_terms`.
    Sampler and trainer must agree on tokens of `newest_version` (None: the newest in the samples). `is_first`: no
    update of this step has moved the policy. Samples and rows are those of this rank; what depends on all tokens of the
    update is computed over those of all ranks.
    """
    events = index_events(samples, rows)
    sampler_E = events.gather([sample.logprobs for sample in samples])
    proximal_E, is_weighted = gather_proximal(events, proximal, sampler_E)
    old_E = proximal_E if is_weighted else sampler_E
    known = {} if step_terms is None else step_terms.scores
    scored = run_scoring_passes(
        model, samples, rows, algorithm.needs - known.keys(), scoring_models=scoring_models, chunk_tokens=chunk_tokens
    ) | {need: events.scatter(events.gather(arrays)) for need, arrays in known.items()}
    columns = {"sampler": sampler_E, "proximal": proximal_E, "is_newest": find_newest(samples, events, newest_version)}
    if step_terms is not None:
        columns |= {"advantages": events.gather(step_terms.advantages), "returns": events.gather(step_terms.returns)}
    own = build_scores(samples, events, old_E, scored, step=step)
    is_fresh = step_terms is None and not is_weighted
    share = measure_share(ranks, algorithm, own, columns["is_newest"]) if is_fresh else None
    gathered = gather_scores(ranks if share is None else Ranks(), own, find_trajectories(samples, events), columns)
    scores, columns = gathered.scores, dict(gathered.columns)
    if is_first:
        scores = replace(scores, is_unmoved_E=(columns["is_newest"] > 0) | is_weighted)
    terms = algorithm.compute_terms(scores) if step_terms is None else step_terms.replace_terms(columns)
    inputs, metrics = compute_inputs(
        scores, terms, columns, algorithm, norm_length=norm_length, is_weighted=is_weighted, proximal=proximal
    )
    inputs = inputs if share is None else share.apply(inputs)

    def keep_own(values_E: np.ndarray) -> np.ndarray:
        return events.scatter(values_E[gathered.own_E])

    return PreparedUpdate(
        inputs=inputs.convert(keep_own),
        metrics=metrics,
        values_R=scored.get("values"),
        returns_R=None if terms.returns_E is None else keep_own(terms.returns_E),
        counts=count_tokens(inputs) if share is None else share.counts,
    )


def compute_inputs(
    scores: BatchScores,
    terms: TokenTerms,
    columns: Mapping[str, np.ndarray],
    algorithm: Algorithm,
    *,
    norm_length: int,
    is_weighted: bool,
    proximal: ProximalScores | None,
) -> tuple[TokenInputs[np.ndarray], dict[str, float]]:
    """Inputs [E] of the loss pass from the scores of all tokens of an update, and metrics."""
    correction_E, correction_metrics = compute_correction_weights(
        scores,
        columns["sampler"],
        algorithm.correction,
        advantages_E=terms.advantages_E,
        proximal_logprobs_E=columns["proximal"],
        is_weighted=is_weighted,
    )
    kept_E, entropy_metrics = find_top_entropy_tokens(scores, fraction=algorithm.top_entropy_fraction)
    inputs = TokenInputs(
        weights_E=compute_weights(scores, algorithm, norm_length=norm_length),
        correction_E=terms.weights_E * correction_E * kept_E,
        advantages_E=terms.advantages_E,
        old_logprobs_E=scores.old_logprobs_E,
        sampler_logprobs_E=columns["sampler"],
        is_newest_E=columns["is_newest"],
        is_expert_E=scores.is_expert_Q[scores.sequence_E].astype(np.float64) if scores.is_expert_Q.any() else None,
        sequence_log_ratios_E=terms.sequence_log_ratios_E,
        constants_E=terms.constants_E,
        is_selected_E=None if terms.is_selected_E is None else terms.is_selected_E.astype(np.float64),
        reference_logprobs_E=scores.reference_logprobs_E if algorithm.kl_coef > 0 else None,
        importance_caps_E=build_caps(scores, algorithm, proximal),
    )
    return inputs, terms.metrics | correction_metrics | entropy_metrics


def compute_step_terms(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    rows: Sequence[Trie],
    algorithm: Algorithm,
    *,
    chunk_tokens: int,
    scoring_models: ScoringModels,
    proximal: ProximalScores | None = None,
    step: int = 0,
    ranks: Ranks = Ranks(),
) -> StepTerms:
    """Run the critic and the other models that do not change within the step on all of its samples."""
    events = index_events(samples, rows)
    old_E = events.gather([sample.logprobs for sample in samples])
    if proximal is not None and proximal.is_weighted:
        assert proximal.logprobs is not None, "with a critic importance weights are computed before the loss pass"
        old_E = events.gather(proximal.logprobs)
    scored = run_scoring_passes(
        model, samples, rows, algorithm.needs - POLICY_SCORES, scoring_models=scoring_models, chunk_tokens=chunk_tokens
    )
    scores = build_scores(samples, events, old_E, scored, step=step)
    gathered = gather_scores(ranks, scores, find_trajectories(samples, events), {})
    terms = algorithm.compute_terms(gathered.scores)
    assert terms.returns_E is not None

    def split(values_R: np.ndarray) -> list[np.ndarray]:
        return scatter_to_samples(values_R, samples, rows)

    return StepTerms(
        scores={need: split(values_R) for need, values_R in scored.items()},
        advantages=split(events.scatter(terms.advantages_E[gathered.own_E])),
        returns=split(events.scatter(terms.returns_E[gathered.own_E])),
        metrics=terms.metrics,
    )


def gather_proximal(
    events: EventIndex, proximal: ProximalScores | None, sampler_E: np.ndarray
) -> tuple[np.ndarray, bool]:
    """Logprobs [E] of the proximal policy, the sampler's if it was not scored; whether losses are weighted by them."""
    if proximal is None or proximal.logprobs is None:
        return sampler_E, False
    return events.gather(proximal.logprobs), proximal.is_weighted


def build_caps(scores: BatchScores, algorithm: Algorithm, proximal: ProximalScores | None) -> np.ndarray | None:
    """The cap [E] of importance weights that the loss pass computes; 0 for expert tokens, which have weight 1."""
    if proximal is None or proximal.logprobs is not None:
        return None
    return np.where(scores.is_expert_Q[scores.sequence_E], 0.0, algorithm.correction.cap)


def compute_weights(scores: BatchScores, algorithm: Algorithm, *, norm_length: int) -> np.ndarray:
    """Aggregation weights [E]; expert tokens are aggregated separately."""
    weigh = partial(compute_token_weights, aggregation=algorithm.aggregation, norm_length=norm_length)
    if not scores.is_expert_Q.any():
        return weigh(scores.sequence_E)
    weights_E, is_expert_E = np.zeros(len(scores.sequence_E)), scores.is_expert_Q[scores.sequence_E]
    for is_kind_E in (is_expert_E, ~is_expert_E):
        weights_E[is_kind_E] = weigh(scores.sequence_E[is_kind_E])
    return weights_E


def run_scoring_passes(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    rows: Sequence[Trie],
    needs: Set[Need],
    *,
    scoring_models: ScoringModels,
    chunk_tokens: int,
) -> dict[Need, np.ndarray]:
    """The scores [R] of the rows' events that are needed, by name."""
    models: dict[Need, PreTrainedModel | None] = {
        "reference": scoring_models.reference,
        "teacher": scoring_models.teacher,
    }
    scores: dict[Need, np.ndarray] = {}
    if needs & POLICY_SCORES:
        logprobs_R, entropies_R = score_tokens(model, samples, rows, chunk_tokens=chunk_tokens)
        of_policy: dict[Need, np.ndarray] = {"logprobs": logprobs_R, "entropies": entropies_R}
        scores |= {need: values_R for need, values_R in of_policy.items() if need in needs}
    for need, scorer in models.items():
        if need in needs:
            assert scorer is not None, need
            state = scoring_models.reference_state
            adapter = None if state is None else state.adapter
            with reference_weights(scorer, adapter) if need == "reference" else nullcontext():
                scores[need] = score_logprobs(scorer, samples, rows, chunk_tokens=chunk_tokens)
    if "values" in needs:
        assert scoring_models.score_values is not None
        scores["values"] = scoring_models.score_values(rows)
    return scores


def score_logprobs(
    model: PreTrainedModel, samples: Sequence[Sample], rows: Sequence[Trie], *, chunk_tokens: int
) -> np.ndarray:
    """Logprobs [R] of the rows' events under a model, each with its sampling distribution applied."""
    return score_tokens(model, samples, rows, chunk_tokens=chunk_tokens)[0]


@torch.no_grad()
def score_tokens(
    model: PreTrainedModel, samples: Sequence[Sample], rows: Sequence[Trie], *, chunk_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Logprobs [R] of the rows' events under a model, and entropies [R] of the distributions that they were sampled
    from, with bias, temperature and filters applied."""
    scores, event_indices, num_events = [], [], 0
    match_rows(model, len(rows))
    if not rows:
        return np.zeros(0), np.zeros(0)
    for trie in rows:
        row = build_row(trie, index_distributions(samples, trie), chunk_tokens=chunk_tokens, model=model)
        hidden_TC = run_body(model, row.input_ids_1T, row.position_ids_1T, row.plan)[0]
        for chunk in row.chunks:
            scores_S = compute_logprobs(
                model,
                hidden_TC[chunk.node_S],
                chunk.target_S,
                chunk.distribution,
                chunk_tokens=len(chunk.target_S),
                adjustment=chunk.adjustment,
            )
            scores.append(torch.stack(scores_S)[:, chunk.site_E])
        event_indices.append(num_events + row.event_E)
        num_events += len(trie.parent_E)
    logprobs_R, entropies_R = np.empty(num_events), np.empty(num_events)
    event_R = np.concatenate(event_indices)
    # the only device synchronization
    logprobs_R[event_R], entropies_R[event_R] = torch.cat(scores, dim=1).double().cpu().numpy()
    return logprobs_R, entropies_R


def scatter_to_samples(logprobs_R: np.ndarray, samples: Sequence[Sample], rows: Sequence[Trie]) -> list[np.ndarray]:
    """Logprobs [R] as one array per sample, NaN at tokens that are not trained."""
    starts = np.cumsum([0, *(len(sample.token_ids) for sample in samples)])
    flat = np.full(starts[-1], np.nan)
    if rows:
        sample_R = np.concatenate([row.sample_E for row in rows])
        flat[starts[sample_R] + np.concatenate([row.time_E for row in rows])] = logprobs_R
    return np.split(flat, starts[1:-1]) if samples else []


def build_scores(
    samples: Sequence[Sample],
    events: EventIndex,
    old_logprobs_E: np.ndarray,
    scored: Mapping[Need, np.ndarray],
    *,
    step: int,
) -> BatchScores:
    """Inputs of `compute_terms`; `scored` holds [R] arrays by name."""
    trajectory_E = find_trajectories(samples, events)
    is_start_E = np.diff(trajectory_E, prepend=-1) != 0
    sequence_E, sample_Q = np.cumsum(is_start_E) - 1, events.sample_E[is_start_E].tolist()

    def get(name: Need) -> np.ndarray | None:
        return scored[name][events.event_E] if name in scored else None

    return BatchScores(
        step=step,
        old_logprobs_E=old_logprobs_E,
        advantages_E=events.gather([sample.advantages for sample in samples]),
        sequence_E=sequence_E,
        group_Q=np.asarray([samples[sample].group_index for sample in sample_Q], dtype=np.int64),
        is_expert_Q=np.asarray([samples[sample].is_expert for sample in sample_Q], dtype=bool),
        logprobs_E=get("logprobs"),
        entropies_E=get("entropies"),
        reference_logprobs_E=get("reference"),
        teacher_logprobs_E=get("teacher"),
        values_E=get("values"),
    )


def find_trajectories(samples: Sequence[Sample], events: EventIndex) -> np.ndarray:
    """The trajectory [E] of each event."""
    return np.asarray([sample.trajectory_index for sample in samples], dtype=np.int64)[events.sample_E]
