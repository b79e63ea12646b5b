"""The scoring pass, and what each trained token is given for the loss pass.

Where an algorithm needs it, all rows of an update are run once without gradients, for one number per trained token: its
logprob under the policy as it is, the reference or the teacher, or a critic's value. Pure functions over all tokens of
the update then make advantages and weights. The loss pass stays per token, so nothing depends on rows and chunks.

Axes: R trained events in the order of the rows, E the same tokens ordered by sequence, sample, time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from tunesmith.algorithms.aggregation import compute_token_weights
from tunesmith.algorithms.algorithm import Algorithm
from tunesmith.algorithms.corrections import compute_correction_weights
from tunesmith.algorithms.scores import BatchScores, Need, TokenInputs
from tunesmith.experience.trie import Trie, read_array
from tunesmith.model.adapters.adapter import disabled_adapter
from tunesmith.model.forward.attention import run_body
from tunesmith.model.forward.logprobs import compute_logprobs
from tunesmith.trainer.batch import build_row, number_distributions
from tunesmith.types import Sample

ScoreRows = Callable[[Sequence[Trie]], np.ndarray]
"""One number [R] for each event of the rows in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Companions:
    """The models beside the policy that may score its tokens."""

    reference: PreTrainedModel | None = None
    """Scored without its adapter, if one is live in it: so the policy itself may stand for its base."""
    teacher: PreTrainedModel | None = None
    score_values: ScoreRows | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstScores:
    """Of the policy that a step began with, which corrections compare with the sampler."""

    logprobs: Sequence[np.ndarray]
    """Per sample and token; read at trained tokens only."""
    is_weighted: bool
    """Losses are multiplied by truncated importance weights and compare with this policy; otherwise tokens are only
    masked, and losses compare with the sampler."""

    def select(self, indices: Sequence[int]) -> FirstScores:
        """Those of some of the samples."""
        return FirstScores(logprobs=[self.logprobs[index] for index in indices], is_weighted=self.is_weighted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """What the loss pass and the critic are given."""

    inputs: TokenInputs[np.ndarray]
    """Arrays are [R]."""
    metrics: dict[str, float]
    values_R: np.ndarray | None
    """What the critic said."""
    returns_R: np.ndarray | None
    """What the critic shall learn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Where each trained token of an update is: in which sample, at which time, and among the events of the rows."""

    sample_E: np.ndarray
    time_E: np.ndarray
    place_E: np.ndarray

    def gather(self, per_token: Sequence[Sequence[float | None] | np.ndarray]) -> np.ndarray:
        """Values [E] that are given per sample and token; NaN for None."""
        flat = np.concatenate([read_array(values, np.float64) for values in per_token])
        starts = np.cumsum([0, *(len(values) for values in per_token)])
        return flat[starts[self.sample_E] + self.time_E]

    def scatter(self, values_E: np.ndarray) -> np.ndarray:
        """The values [R] in the order of the rows."""
        values_R = np.empty_like(values_E)
        values_R[self.place_E] = values_E
        return values_R


def prepare_update(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    rows: Sequence[Trie],
    algorithm: Algorithm,
    *,
    norm_length: int,
    chunk_tokens: int,
    companions: Companions = Companions(),
    first: FirstScores | None = None,
    newest_version: int | None = None,
    step: int = 0,
) -> Preparation:
    """Run the scoring passes that the algorithm needs, and make of them what every trained token is given.

    Losses compare with the sampler's logprobs, which on fresh data are those of the step's first policy but for
    rounding; with `first.is_weighted` they compare with the first policy. Sampler and trainer must agree on what
    `newest_version` sampled; None takes the newest version here.
    """
    events = list_events(samples, rows)
    sampler_E = events.gather([sample.logprobs for sample in samples])
    first_E = sampler_E if first is None else events.gather(first.logprobs)
    is_weighted = first is not None and first.is_weighted
    old_E = first_E if is_weighted else sampler_E
    found = run_scoring_passes(model, samples, rows, algorithm, companions=companions, chunk_tokens=chunk_tokens)
    scores = build_scores(samples, events, old_E, found, step=step)
    terms = algorithm.compute_terms(scores)
    correction_E, correction_metrics = compute_correction_weights(
        scores, sampler_E, algorithm.correction, first_logprobs_E=first_E, is_weighted=is_weighted
    )
    inputs = TokenInputs(
        weights_E=weigh_tokens(scores, algorithm, norm_length=norm_length),
        correction_E=terms.weights_E * correction_E,
        advantages_E=terms.advantages_E,
        old_logprobs_E=old_E,
        sampler_logprobs_E=sampler_E,
        is_newest_E=find_newest(samples, events, newest_version),
        is_expert_E=scores.is_expert_Q[scores.sequence_E].astype(np.float64) if scores.is_expert_Q.any() else None,
        sequence_log_ratios_E=terms.sequence_log_ratios_E,
        constants_E=terms.constants_E,
        reference_logprobs_E=scores.reference_logprobs_E if algorithm.kl_coef > 0 else None,
    )
    return Preparation(
        inputs=inputs.convert(events.scatter),
        metrics=terms.metrics | correction_metrics,
        values_R=found.get("values"),
        returns_R=None if terms.returns_E is None else events.scatter(terms.returns_E),
    )


def weigh_tokens(scores: BatchScores, algorithm: Algorithm, *, norm_length: int) -> np.ndarray:
    """Shares [E] of the tokens in the update's loss; what experts gave is aggregated by itself."""
    weigh = partial(compute_token_weights, aggregation=algorithm.aggregation, norm_length=norm_length)
    if not scores.is_expert_Q.any():
        return weigh(scores.sequence_E)
    weights_E, is_expert_E = np.zeros(len(scores.sequence_E)), scores.is_expert_Q[scores.sequence_E]
    for is_kind_E in (is_expert_E, ~is_expert_E):
        weights_E[is_kind_E] = weigh(scores.sequence_E[is_kind_E])
    return weights_E


def list_events(samples: Sequence[Sample], rows: Sequence[Trie]) -> Events:
    """The trained tokens of the rows, ordered by trajectory, sample, time."""
    sample_R = np.concatenate([row.sample_E for row in rows])
    time_R = np.concatenate([row.time_E for row in rows])
    order = np.argsort([sample.trajectory_index for sample in samples], kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    place_E = np.argsort(rank[sample_R] * (time_R.max(initial=0) + 1) + time_R, kind="stable")
    return Events(sample_E=sample_R[place_E], time_E=time_R[place_E], place_E=place_E)


def run_scoring_passes(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    rows: Sequence[Trie],
    algorithm: Algorithm,
    *,
    companions: Companions,
    chunk_tokens: int,
) -> dict[str, np.ndarray]:
    """What the algorithm needs to know of the rows' events [R]."""
    models: dict[Need, PreTrainedModel | None] = {
        "logprobs": model,
        "reference": companions.reference,
        "teacher": companions.teacher,
    }
    found: dict[str, np.ndarray] = {}
    for need, scorer in models.items():
        if need in algorithm.needs:
            assert scorer is not None, need
            with disabled_adapter(scorer) if need == "reference" else nullcontext():
                found[need] = score_logprobs(scorer, samples, rows, chunk_tokens=chunk_tokens)
    if "values" in algorithm.needs:
        assert companions.score_values is not None
        found["values"] = companions.score_values(rows)
    return found


@torch.no_grad()
def score_logprobs(
    model: PreTrainedModel, samples: Sequence[Sample], rows: Sequence[Trie], *, chunk_tokens: int
) -> np.ndarray:
    """Logprobs [R] of the rows' events under a model, by the distributions that they were sampled from."""
    scored, places, num_events = [], [], 0
    for trie in rows:
        row = build_row(trie, number_distributions(samples, trie), chunk_tokens=chunk_tokens, model=model)
        hidden_TC = run_body(model, row.input_ids_1T, row.position_ids_1T, row.plan)[0]
        for chunk in row.chunks:
            logprobs_S, _ = compute_logprobs(
                model, hidden_TC[chunk.node_S], chunk.target_S, chunk.distribution, chunk_tokens=len(chunk.target_S)
            )
            scored.append(logprobs_S[chunk.site_E])
        places.append(num_events + row.event_E)
        num_events += len(trie.parent_E)
    logprobs_R = np.empty(num_events)
    logprobs_R[np.concatenate(places)] = torch.cat(scored).double().cpu().numpy()  # the only wait for the device
    return logprobs_R


def spread_logprobs(logprobs_R: np.ndarray, samples: Sequence[Sample], rows: Sequence[Trie]) -> list[np.ndarray]:
    """Per sample and token, what was scored for the rows' events; NaN at tokens that do not train."""
    starts = np.cumsum([0, *(len(sample.token_ids) for sample in samples)])
    flat = np.full(starts[-1], np.nan)
    sample_R = np.concatenate([row.sample_E for row in rows])
    flat[starts[sample_R] + np.concatenate([row.time_E for row in rows])] = logprobs_R
    return np.split(flat, starts[1:-1])


def build_scores(
    samples: Sequence[Sample], events: Events, old_logprobs_E: np.ndarray, found: dict[str, np.ndarray], *, step: int
) -> BatchScores:
    """All trained tokens of the update with what was found out about them."""
    trajectory_E = np.asarray([sample.trajectory_index for sample in samples])[events.sample_E]
    is_first_E = np.diff(trajectory_E, prepend=-1) != 0
    sequence_E, sample_Q = np.cumsum(is_first_E) - 1, events.sample_E[is_first_E].tolist()

    def find(name: str) -> np.ndarray | None:
        return found[name][events.place_E] if name in found else None

    return BatchScores(
        step=step,
        old_logprobs_E=old_logprobs_E,
        advantages_E=events.gather([sample.advantages for sample in samples]),
        sequence_E=sequence_E,
        sample_E=events.sample_E,
        time_E=events.time_E,
        group_Q=np.asarray([samples[sample].group_index for sample in sample_Q]),
        is_expert_Q=np.asarray([samples[sample].is_expert for sample in sample_Q], dtype=bool),
        logprobs_E=find("logprobs"),
        reference_logprobs_E=find("reference"),
        teacher_logprobs_E=find("teacher"),
        values_E=find("values"),
    )


def find_newest(samples: Sequence[Sample], events: Events, newest_version: int | None) -> np.ndarray:
    """1.0 [E] where the newest policy version sampled the token; what an expert gave, no policy sampled."""
    version_E = events.gather([sample.policy_versions for sample in samples])
    version_E[np.asarray([sample.is_expert for sample in samples])[events.sample_E]] = np.nan
    if newest_version is None:
        newest_version = int(np.nanmax(version_E, initial=-1))
    return (version_E == newest_version).astype(np.float64)


def has_older_tokens(samples: Sequence[Sample], newest_version: int | None) -> bool:
    """Whether a policy version older than the newest sampled a token of the samples."""
    versions = {
        version
        for sample in samples
        if not sample.is_expert
        for version in sample.policy_versions
        if version is not None
    }
    newest = newest_version if newest_version is not None else max(versions, default=0)
    return any(version < newest for version in versions)
