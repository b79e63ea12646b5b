"""The scoring pass: independent of packing, and the inputs of corrected losses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from padded import UPDATES
from test_adapter_training import build_adapted
from test_gradients import DISTRIBUTIONS, NORM_LENGTH, assert_same, build_samples, take_gradient

from trainable_models import build_frozen, build_shallow, build_trainable
from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.config import AlgorithmSection, CorrectionSection, MaskSection
from tunesmith.trainer.batch import index_events
from tunesmith.trainer.loss_pass import PassSetup, run_loss_pass
from tunesmith.trainer.packing import pack_samples
from tunesmith.trainer.reference import Reference
from tunesmith.trainer.scoring_pass import (
    ScoringModels,
    run_scoring_passes,
    scatter_to_samples,
    score_tokens,
)
from tunesmith.trainer.update import StepScores, build_inputs, find_versions, prepare_update
from tunesmith.types import Sample

PACKINGS = [
    {"max_tokens_per_row": 25, "has_prefix_sharing": True},
    {"max_tokens_per_row": 60, "has_prefix_sharing": False},
]
EXACT = {"max_tokens_per_row": 10_000, "has_prefix_sharing": True}


def score_values(rows) -> np.ndarray:
    """A critic whose value depends on the position of the token in its sample."""
    return np.concatenate([np.sin(3.0 * row.sample_E + row.time_E) for row in rows])


def run(model, samples, section, *, packing=EXACT, chunk_tokens=1000, proximal=StepScores()):
    """Loss and gradient of one update, and the prepared update."""
    algorithm = resolve_algorithm(section)
    rows = pack_samples(samples, hidden_size=32, **packing)
    scoring_models = ScoringModels(
        reference=Reference(build_frozen(1)), teacher=build_frozen(2), score_values=score_values
    )
    setup = PassSetup(model=model, norm_length=NORM_LENGTH, chunk_tokens=chunk_tokens, scoring_models=scoring_models)
    prepared = prepare_update(
        setup,
        algorithm,
        samples,
        rows,
        scores=proximal,
        step=3,
    )
    totals = run_loss_pass(setup, algorithm, samples, rows, prepared.inputs)
    return (totals["train/loss"][1].item(), take_gradient(model)), prepared


def build_near_samples(model, seed: int = 6) -> list[Sample]:
    """Samples whose recorded logprobs are close to the model's, so that ratios are moderate."""
    rng = np.random.default_rng(seed)
    samples = build_samples(seed)
    rows = pack_samples(samples, hidden_size=32, **EXACT)
    exact = scatter_to_samples(score_tokens(model, samples, rows, chunk_tokens=1000)[0], samples, rows)
    return [
        replace(sample, logprobs=tuple(np.nan_to_num(logprobs) + 0.1 * rng.standard_normal(len(logprobs))))
        for sample, logprobs in zip(samples, exact, strict=True)
    ]


@pytest.mark.parametrize("name", UPDATES)
def test_gradient_of_every_algorithm_does_not_depend_on_packing(name):
    """Each algorithm in one of the packings; algorithms that differ in advantages alone are tested once."""
    model = build_shallow()
    samples = build_near_samples(model)
    section = AlgorithmSection(algorithm_type=name)
    expected, prepared = run(model, samples, section)
    assert expected[1].norm() > 0
    packing = PACKINGS[UPDATES.index(name) % 2]
    found, again = run(model, samples, section, packing=packing, chunk_tokens=3)
    assert_same(found, expected, tolerance=1e-9)
    assert again.inputs.metrics == pytest.approx(prepared.inputs.metrics, rel=1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm_type": "rec", "loss_args": {"clip_mode": "gspo-one-side", "weight": "gspo_importance_sampling"}},
        {"algorithm_type": "rloo", "terms_args": {"reward_kl_coef": 0.1}},
        {"kl_coef": 0.1, "kl_estimator": "corrected_k3"},
        {"kl_coef": 0.1, "kl_estimator": "abs"},
        {"correction": {"negative_sequence_delta": 0.0}},
        {"algorithm_type": "dpo", "terms_args": {"loss_type": "ipo", "has_length_norm": True}},
        {"algorithm_type": "dpo", "terms_args": {"loss_type": "hinge"}},
        {"algorithm_type": "dpo", "terms_args": {"loss_type": "robust", "label_smoothing": 0.2}},
        *({"algorithm_type": "gspo", "loss_aggregation": each} for each in ("token-mean", "seq-mean-token-sum")),
    ],
)
def test_gradient_with_options_does_not_depend_on_packing(changes):
    model = build_shallow()
    samples, section = build_near_samples(model), AlgorithmSection(**changes)
    expected, _ = run(model, samples, section)
    for packing in PACKINGS:
        assert_same(run(model, samples, section, packing=packing, chunk_tokens=3)[0], expected, tolerance=1e-9)


def test_scored_logprobs_equal_those_of_the_loss_pass():
    """So the ratio of a policy and itself is exactly 1, and its gradient is the policy gradient."""
    model, samples = build_shallow(), build_samples()
    rows = pack_samples(samples, hidden_size=32, **EXACT)
    exact = scatter_to_samples(score_tokens(model, samples, rows, chunk_tokens=5)[0], samples, rows)
    assert [np.isfinite(logprobs).tolist() for logprobs in exact] == [list(sample.is_sampled) for sample in samples]
    own = [replace(sample, logprobs=tuple(np.nan_to_num(lp))) for sample, lp in zip(samples, exact, strict=True)]
    plain = AlgorithmSection(algorithm_type="reinforce", loss_aggregation="token-mean")
    expected = run(model, own, plain)[0][1]
    names = ("grpo", "importance_sampling", "cispo", "sapo", "sppo", "rec", "topr", "m2po")
    for name in (*names, "dppo_tv", "dppo_kl", "gmpo", "luspo", "vespo", "clip_cov", "kl_cov"):
        section = AlgorithmSection(algorithm_type=name, loss_aggregation="token-mean")
        torch.testing.assert_close(run(model, own, section)[0][1], expected, rtol=1e-9, atol=1e-12)


def test_gspo_weights_tokens_by_the_sequence_ratio():
    model = build_shallow()
    samples = build_near_samples(model)
    _, prepared = run(model, samples, AlgorithmSection(algorithm_type="gspo"))
    rows = pack_samples(samples, hidden_size=32, **EXACT)
    logprobs_R = score_tokens(model, samples, rows, chunk_tokens=1000)[0]
    gaps: dict[int, list[float]] = {}
    events = [(sample, time) for row in rows for sample, time in zip(row.sample_E, row.time_E, strict=True)]
    for (sample, time), logprob in zip(events, logprobs_R, strict=True):
        gaps.setdefault(samples[sample].trajectory_index, []).append(logprob - samples[sample].logprobs[time])
    expected = [np.mean(gaps[samples[sample].trajectory_index]) for sample, _ in events]
    np.testing.assert_allclose(prepared.inputs.sequence_log_ratios_E, expected, rtol=1e-9)


def score_proximal(model, samples) -> StepScores:
    rows = pack_samples(samples, hidden_size=32, **EXACT)
    logprobs_R = score_tokens(model, samples, rows, chunk_tokens=1000)[0]
    return StepScores(columns={"proximal_logprobs_E": scatter_to_samples(logprobs_R, samples, rows)}, is_weighted=True)


def test_corrected_loss_has_proximal_ratio_and_truncated_weights():
    """By hand: -A min(proximal / sampler, cap), with a ratio of policy and proximal policy of exactly 1."""
    model, samples = build_shallow(), build_near_samples(build_shallow())
    proximal = score_proximal(model, samples)
    section = AlgorithmSection(correction=CorrectionSection(cap=1.05))
    (loss, _), prepared = run(model, samples, section, proximal=proximal)
    terms, num_capped = [], 0
    for sample, logprobs in zip(samples, proximal.columns["proximal_logprobs_E"], strict=True):
        for time in np.flatnonzero(sample.is_sampled):
            weight = np.exp(logprobs[time] - sample.logprobs[time])
            terms.append(-sample.advantages[time] * min(weight, 1.05))
            num_capped += weight > 1.05
    assert loss == pytest.approx(np.mean(terms), rel=1e-9)
    assert prepared.inputs.metrics["correction/truncated_frac"] == pytest.approx(num_capped / len(terms))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_masks_do_not_depend_on_packing(level):
    model = build_shallow()
    samples = build_near_samples(model)
    proximal = score_proximal(model, samples)
    mask = MaskSection(level=level, low=0.95, high=1.05)
    section = AlgorithmSection(correction=CorrectionSection(importance="none", mask=mask))
    expected, prepared = run(model, samples, section, proximal=replace(proximal, is_weighted=False))
    assert 0 < prepared.inputs.metrics["correction/masked_frac"] < 1
    kept = prepared.inputs.correction_E
    assert set(kept) == {0.0, 1.0}
    for packing in PACKINGS:
        found, _ = run(model, samples, section, packing=packing, proximal=replace(proximal, is_weighted=False))
        assert_same(found, expected, tolerance=1e-9)


def test_expert_tokens_are_aggregated_separately_and_not_corrected():
    model = build_shallow()
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
    model, samples = build_shallow(), build_samples()
    old = [replace(s, policy_versions=tuple(3 if m else None for m in s.is_sampled)) for s in samples[:5]]
    new = [replace(s, policy_versions=tuple(4 if m else None for m in s.is_sampled)) for s in samples[5:]]
    rows = pack_samples([*old, *new], hidden_size=32, **EXACT)
    algorithm = resolve_algorithm(AlgorithmSection())

    def count_newest(newest_version):
        inputs = prepare_update(
            PassSetup(model=model, norm_length=1, chunk_tokens=100),
            algorithm,
            [*old, *new],
            rows,
            newest_version=newest_version,
        ).inputs
        return inputs.is_newest_E.sum()

    assert count_newest(None) == count_newest(4) == sum(sum(s.is_sampled) for s in new)
    assert count_newest(5) == 0
    assert min(find_versions([*old, *new])) < 4 and find_versions(new) == {4}
    assert find_versions([replace(s, is_expert=True) for s in old] + new) == {4}


@pytest.mark.parametrize("packing", [EXACT, *PACKINGS])
def test_events_are_ordered_by_trajectory_sample_and_time(packing):
    samples = list(reversed(build_samples()))
    rows = pack_samples(samples, hidden_size=32, **packing)
    events = index_events(samples, rows)
    expected = sorted(
        (sample.trajectory_index, index, time)
        for index, sample in enumerate(samples)
        for time in np.flatnonzero(sample.is_sampled).tolist()
    )
    assert list(zip(events.sample_E.tolist(), events.time_E.tolist(), strict=True)) == [each[1:] for each in expected]
    for field, values_E in (("sample_E", events.sample_E), ("time_E", events.time_E)):
        np.testing.assert_array_equal(events.scatter(values_E), np.concatenate([getattr(row, field) for row in rows]))


def test_each_score_goes_to_its_own_column_in_the_order_of_the_events():
    model, samples = build_shallow(), list(reversed(build_samples()))
    rows = pack_samples(samples, hidden_size=32, **PACKINGS[0])
    events = index_events(samples, rows)
    models = {"reference": build_shallow(seed=1), "teacher": build_shallow(seed=2)}
    scoring_models = ScoringModels(
        reference=Reference(models["reference"]), teacher=models["teacher"], score_values=score_values
    )
    setup = PassSetup(model=model, chunk_tokens=100, scoring_models=scoring_models)
    logprobs_R, entropies_R = score_tokens(model, samples, rows, chunk_tokens=100)
    expected = {
        "logprobs": ("logprobs_E", logprobs_R),
        "entropies": ("entropies_E", entropies_R),
        "reference": ("reference_logprobs_E", score_tokens(models["reference"], samples, rows, chunk_tokens=100)[0]),
        "teacher": ("teacher_logprobs_E", score_tokens(models["teacher"], samples, rows, chunk_tokens=100)[0]),
        "values": ("values_E", score_values(rows)),
    }
    columns = {column for column, _ in expected.values()}
    for need, (column, scores_R) in expected.items():
        tokens = build_inputs(setup, frozenset({need}), samples, rows, events, StepScores(), step=2)
        np.testing.assert_array_equal(getattr(tokens, column), scores_R[events.event_E])
        assert tokens.list_columns().keys() & columns == {column}
        assert tokens.step == 2


@pytest.mark.parametrize("packing", [EXACT, *PACKINGS])
def test_the_critic_gets_values_and_returns_in_the_order_of_the_rows(packing):
    """By hand: returns with lambda 1 are the discounted reward of the run, at its last token."""
    model, samples = build_shallow(), build_samples()
    section = AlgorithmSection(algorithm_type="ppo", terms_args={"gamma": 0.9})
    _, prepared = run(model, samples, section, packing=packing)
    rows = pack_samples(samples, hidden_size=32, **packing)
    np.testing.assert_array_equal(prepared.inputs.values_E, score_values(rows))
    times: dict[int, list[tuple[int, int]]] = {}
    for index, sample in sorted(enumerate(samples), key=lambda each: each[1].trajectory_index):
        times.setdefault(sample.trajectory_index, []).extend((index, t) for t in np.flatnonzero(sample.is_sampled))
    return_of = {}
    for places in times.values():
        last_sample, last_time = places[-1]
        for step, place in enumerate(reversed(places)):
            return_of[place] = samples[last_sample].advantages[last_time] * 0.9**step
    places = [place for row in rows for place in zip(row.sample_E.tolist(), row.time_E.tolist(), strict=True)]
    np.testing.assert_allclose(prepared.inputs.returns_E, [return_of[place] for place in places], rtol=1e-9)


def test_only_the_reference_is_scored_without_its_adapter():
    """An adapted model as policy, reference and teacher at once."""
    model, samples = build_adapted(dtype=torch.float64), build_samples()
    rows = pack_samples(samples, hidden_size=32, **EXACT)
    adapted = score_tokens(model, samples, rows, chunk_tokens=100)[0]
    base = score_tokens(build_trainable(), samples, rows, chunk_tokens=100)[0]
    assert abs(adapted - base).max() > 1e-2
    scored = run_scoring_passes(
        model, samples, rows, {"logprobs", "reference", "teacher", "values"},
        scoring_models=ScoringModels(reference=Reference(model), teacher=model, score_values=score_values),
        chunk_tokens=100,
    )  # fmt: skip
    expected = {"logprobs": adapted, "reference": base, "teacher": adapted, "values": score_values(rows)}
    assert scored.keys() == expected.keys()
    with_entropies = run_scoring_passes(
        model, samples, rows, {"entropies"}, scoring_models=ScoringModels(), chunk_tokens=100
    )
    assert with_entropies.keys() == {"entropies"}
    for need, logprobs in expected.items():
        np.testing.assert_array_equal(scored[need], logprobs)


@pytest.mark.parametrize("name", ["ppo", "reinforceplusplus", "on_policy_distill", "jsd"])
def test_sequences_are_masked_by_the_advantages_of_the_loss(name):
    """Rewards are 0 or 1, so none is negative; the advantages that are computed from them are."""
    model = build_shallow()
    samples = [
        replace(sample, advantages=tuple(float(is_sampled and sample.trajectory_index % 2) for is_sampled in mask))
        for sample in build_near_samples(model)
        for mask in [sample.is_sampled]
    ]
    section = AlgorithmSection(algorithm_type=name, correction={"negative_sequence_delta": 0.0})
    _, prepared = run(model, samples, section)
    rows = pack_samples(samples, hidden_size=32, **EXACT)
    events = index_events(samples, rows)
    trajectory_R = np.asarray([samples[index].trajectory_index for index in events.scatter(events.sample_E)])
    distance_R = prepared.inputs.sampler_logprobs_E - score_tokens(model, samples, rows, chunk_tokens=1000)[0]
    masked = prepared.inputs.correction_E == 0
    for trajectory in set(trajectory_R.tolist()):
        own = trajectory_R == trajectory
        is_masked = prepared.inputs.advantages_E[own].mean() < 0 and distance_R[own].mean() > 0
        assert (masked[own] == is_masked).all()
    assert masked.any() and not masked.all()


def test_samples_have_several_distributions():
    """Otherwise the tests above would be weaker."""
    found = {span.distribution for sample in build_samples() for span in sample.distribution_spans}
    assert len(found) == len(DISTRIBUTIONS)
