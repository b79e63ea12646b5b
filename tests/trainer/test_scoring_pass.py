"""The scoring pass: independent of packing, and the inputs of corrected losses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_gradients import DISTRIBUTIONS, NORM_LENGTH, assert_same, build_samples, take_gradient

from trainable_models import build_trainable
from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.algorithms.table import ALGORITHMS
from tunesmith.config import AlgorithmSection, CorrectionSection, MaskSection
from tunesmith.trainer.loss_pass import run_loss_pass
from tunesmith.trainer.packing import pack_samples
from tunesmith.trainer.scoring_pass import (
    ProximalScores,
    ScoringModels,
    has_older_tokens,
    prepare_update,
    scatter_to_samples,
    score_logprobs,
)
from tunesmith.types import Sample

PACKINGS = [
    {"max_tokens_per_row": 25, "has_prefix_sharing": True},
    {"max_tokens_per_row": 60, "has_prefix_sharing": False},
]
EXACT = {"max_tokens_per_row": 10_000, "has_prefix_sharing": True}


def score_values(rows) -> np.ndarray:
    """A critic whose value depends on the position of the token in its sample."""
    return np.concatenate([np.sin(3.0 * row.sample_E + row.time_E) for row in rows])


def run(model, samples, section, *, packing=EXACT, chunk_tokens=1000, proximal=None):
    """Loss and gradient of one update, and the prepared update."""
    algorithm = resolve_algorithm(section)
    rows = pack_samples(samples, hidden_size=32, **packing)
    scoring_models = ScoringModels(
        reference=build_trainable(seed=1), teacher=build_trainable(seed=2), score_values=score_values
    )
    prepared = prepare_update(
        model, samples, rows, algorithm,
        norm_length=NORM_LENGTH, chunk_tokens=chunk_tokens, scoring_models=scoring_models, proximal=proximal, step=3,
    )  # fmt: skip
    totals = run_loss_pass(model, samples, rows, algorithm, prepared.inputs, chunk_tokens=chunk_tokens)
    return (totals["train/loss"].value.item(), take_gradient(model)), prepared


def build_near_samples(model, seed: int = 6) -> list[Sample]:
    """Samples whose recorded logprobs are close to the model's, so that ratios are moderate."""
    rng = np.random.default_rng(seed)
    samples = build_samples(seed)
    rows = pack_samples(samples, hidden_size=32, **EXACT)
    exact = scatter_to_samples(score_logprobs(model, samples, rows, chunk_tokens=1000), samples, rows)
    return [
        replace(sample, logprobs=tuple(np.nan_to_num(logprobs) + 0.1 * rng.standard_normal(len(logprobs))))
        for sample, logprobs in zip(samples, exact, strict=True)
    ]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_gradient_of_every_algorithm_does_not_depend_on_packing(name):
    model = build_trainable()
    samples = build_near_samples(model)
    section = AlgorithmSection(algorithm_type=name)
    expected, prepared = run(model, samples, section)
    assert expected[1].norm() > 0
    for packing in PACKINGS:
        found, again = run(model, samples, section, packing=packing, chunk_tokens=3)
        assert_same(found, expected, tolerance=1e-9)
        assert again.metrics == pytest.approx(prepared.metrics, rel=1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm_type": "rec", "loss_args": {"clip_mode": "gspo-one-side", "weight": "gspo_importance_sampling"}},
        {"algorithm_type": "rloo", "terms_args": {"reward_kl_coef": 0.1}},
        {"kl_coef": 0.1, "kl_estimator": "corrected_k3"},
        {"kl_coef": 0.1, "kl_estimator": "abs"},
        {"correction": {"negative_sequence_delta": 0.0}},
        *({"algorithm_type": "gspo", "loss_aggregation": each} for each in ("token-mean", "seq-mean-token-sum")),
    ],
)
def test_gradient_with_options_does_not_depend_on_packing(changes):
    model = build_trainable()
    samples, section = build_near_samples(model), AlgorithmSection(**changes)
    expected, _ = run(model, samples, section)
    for packing in PACKINGS:
        assert_same(run(model, samples, section, packing=packing, chunk_tokens=3)[0], expected, tolerance=1e-9)


def test_scored_logprobs_equal_those_of_the_loss_pass():
    """So the ratio of a policy and itself is exactly 1, and its gradient is the policy gradient."""
    model, samples = build_trainable(), build_samples()
    rows = pack_samples(samples, hidden_size=32, **EXACT)
    exact = scatter_to_samples(score_logprobs(model, samples, rows, chunk_tokens=5), samples, rows)
    assert [np.isfinite(logprobs).tolist() for logprobs in exact] == [list(sample.is_sampled) for sample in samples]
    own = [replace(sample, logprobs=tuple(np.nan_to_num(lp))) for sample, lp in zip(samples, exact, strict=True)]
    plain = AlgorithmSection(algorithm_type="reinforce", loss_aggregation="token-mean")
    expected = run(model, own, plain)[0][1]
    for name in ("grpo", "importance_sampling", "cispo", "sapo", "sppo", "rec", "topr", "m2po"):
        section = AlgorithmSection(algorithm_type=name, loss_aggregation="token-mean")
        torch.testing.assert_close(run(model, own, section)[0][1], expected, rtol=1e-9, atol=1e-12)


def test_gspo_weights_tokens_by_the_sequence_ratio():
    model = build_trainable()
    samples = build_near_samples(model)
    _, prepared = run(model, samples, AlgorithmSection(algorithm_type="gspo"))
    rows = pack_samples(samples, hidden_size=32, **EXACT)
    logprobs_R = score_logprobs(model, samples, rows, chunk_tokens=1000)
    gaps: dict[int, list[float]] = {}
    events = [(sample, time) for row in rows for sample, time in zip(row.sample_E, row.time_E, strict=True)]
    for (sample, time), logprob in zip(events, logprobs_R, strict=True):
        gaps.setdefault(samples[sample].trajectory_index, []).append(logprob - samples[sample].logprobs[time])
    expected = [np.mean(gaps[samples[sample].trajectory_index]) for sample, _ in events]
    np.testing.assert_allclose(prepared.inputs.sequence_log_ratios_E, expected, rtol=1e-9)


def score_proximal(model, samples) -> ProximalScores:
    rows = pack_samples(samples, hidden_size=32, **EXACT)
    logprobs_R = score_logprobs(model, samples, rows, chunk_tokens=1000)
    return ProximalScores(logprobs=scatter_to_samples(logprobs_R, samples, rows), is_weighted=True)


def test_corrected_loss_has_proximal_ratio_and_truncated_weights():
    """By hand: -A min(proximal / sampler, cap), with a ratio of policy and proximal policy of exactly 1."""
    model, samples = build_trainable(), build_near_samples(build_trainable())
    proximal = score_proximal(model, samples)
    section = AlgorithmSection(correction=CorrectionSection(cap=1.05))
    (loss, _), prepared = run(model, samples, section, proximal=proximal)
    terms, num_capped = [], 0
    for sample, logprobs in zip(samples, proximal.logprobs, strict=True):
        for time in np.flatnonzero(sample.is_sampled):
            weight = np.exp(logprobs[time] - sample.logprobs[time])
            terms.append(-sample.advantages[time] * min(weight, 1.05))
            num_capped += weight > 1.05
    assert loss == pytest.approx(np.mean(terms), rel=1e-9)
    assert prepared.metrics["correction/truncated_frac"] == pytest.approx(num_capped / len(terms))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_masks_do_not_depend_on_packing(level):
    model = build_trainable()
    samples = build_near_samples(model)
    proximal = score_proximal(model, samples)
    mask = MaskSection(level=level, low=0.95, high=1.05)
    section = AlgorithmSection(correction=CorrectionSection(importance="none", mask=mask))
    expected, prepared = run(model, samples, section, proximal=replace(proximal, is_weighted=False))
    assert 0 < prepared.metrics["correction/masked_frac"] < 1
    kept = prepared.inputs.correction_E
    assert set(kept) == {0.0, 1.0}
    for packing in PACKINGS:
        found, _ = run(model, samples, section, packing=packing, proximal=replace(proximal, is_weighted=False))
        assert_same(found, expected, tolerance=1e-9)


def test_expert_tokens_are_aggregated_separately_and_not_corrected():
    model = build_trainable()
    own = build_near_samples(model)
    expert = replace(
        own[0], is_expert=True, logprobs=(0.0,) * len(own[0].token_ids), group_index=9, trajectory_index=99
    )
    samples = [*own, expert]
    proximal = score_proximal(model, samples)
    _, prepared = run(model, samples, AlgorithmSection(kl_coef=0.1), proximal=proximal)
    is_expert = prepared.inputs.is_expert_E == 1
    assert is_expert.sum() == sum(expert.is_sampled)
    assert prepared.inputs.weights_E[is_expert].sum() == pytest.approx(1.0)
    assert prepared.inputs.weights_E[~is_expert].sum() == pytest.approx(1.0)
    assert (prepared.inputs.correction_E[is_expert] == 1).all()
    assert not prepared.inputs.is_newest_E[is_expert].any()
    assert run(model, own, AlgorithmSection())[1].inputs.is_expert_E is None


def test_tokens_of_the_newest_version_are_marked():
    model, samples = build_trainable(), build_samples()
    old = [replace(s, policy_versions=tuple(3 if m else None for m in s.is_sampled)) for s in samples[:5]]
    new = [replace(s, policy_versions=tuple(4 if m else None for m in s.is_sampled)) for s in samples[5:]]
    rows = pack_samples([*old, *new], hidden_size=32, **EXACT)
    algorithm = resolve_algorithm(AlgorithmSection())

    def count_newest(newest_version):
        inputs = prepare_update(
            model, [*old, *new], rows, algorithm,
            norm_length=1, chunk_tokens=100, newest_version=newest_version,
        ).inputs  # fmt: skip
        return inputs.is_newest_E.sum()

    assert count_newest(None) == count_newest(4) == sum(sum(s.is_sampled) for s in new)
    assert count_newest(5) == 0
    assert has_older_tokens([*old, *new], None) and has_older_tokens(new, 5)
    assert not has_older_tokens(new, 4) and not has_older_tokens(new, None)
    assert not has_older_tokens([replace(s, is_expert=True) for s in old] + new, 4)


def test_samples_have_several_distributions():
    """Otherwise the tests above would be weaker."""
    found = {span.distribution for sample in build_samples() for span in sample.distribution_spans}
    assert len(found) == len(DISTRIBUTIONS)
