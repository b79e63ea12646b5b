"""The scoring pass: one number for each trained token, without gradients.

If the algorithm needs it, all rows of an update run once before the loss pass: for the logprob of each trained token
under the current policy, the reference or the teacher, for the policy's entropy, or for the critic's value.

Axes: R trained events in the order of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from tunesmith.algorithms.scores import Need
from tunesmith.experience.samples import Trie
from tunesmith.model.forward.attention import run_body
from tunesmith.model.forward.logprobs import compute_logprobs
from tunesmith.trainer.batch import build_row, index_distributions, routed
from tunesmith.trainer.reference import Reference
from tunesmith.trainer.sharding.matched_rows import match_rows
from tunesmith.types import Sample

POLICY_SCORES: frozenset[Need] = frozenset({"logprobs", "entropies"})
"""Scores of the current policy, which change with every update."""
ScoreRows = Callable[[Sequence[Trie]], np.ndarray]
"""One number [R] for each event, concatenated over rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringModels:
    """Extra models that score the policy's tokens; None if the algorithm does not need the model."""

    reference: Reference | None = None
    teacher: PreTrainedModel | None = None
    score_values: ScoreRows | None = None


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
    scores: dict[Need, np.ndarray] = {}
    if needs & POLICY_SCORES:
        logprobs_R, entropies_R = score_tokens(model, samples, rows, chunk_tokens=chunk_tokens)
        of_policy: dict[Need, np.ndarray] = {"logprobs": logprobs_R, "entropies": entropies_R}
        scores |= {need: values_R for need, values_R in of_policy.items() if need in needs}
    if "reference" in needs:
        assert scoring_models.reference is not None
        with scoring_models.reference.installed() as reference:
            scores["reference"], _ = score_tokens(reference, samples, rows, chunk_tokens=chunk_tokens)
    if "teacher" in needs:
        assert scoring_models.teacher is not None
        scores["teacher"], _ = score_tokens(scoring_models.teacher, samples, rows, chunk_tokens=chunk_tokens)
    if "values" in needs:
        assert scoring_models.score_values is not None
        scores["values"] = scoring_models.score_values(rows)
    return scores


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
        with routed(model, samples, trie, row):
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
