"""Losses of whole sequences and masks by entropy in the trainer, against the formulas of the papers.

The expected values are one expression of all logprobs, differentiated by autograd, on plain forwards of single samples.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from padded import aggregate, build_off_policy, compute_ppo_losses, correct, estimate_kl, pad, read_tokens
from test_algorithm_gradients import assert_equal_to, gather_old
from test_critic import build_value_model
from test_gradients import assert_same, build_samples, score_naively, take_gradient
from test_scoring_pass import EXACT, PACKINGS, build_near_samples, run

from trainable_models import build_frozen, build_trainable
from tunesmith.config import AlgorithmSection, TrainerSection
from tunesmith.trainer.packing import pack_samples
from tunesmith.trainer.scoring_pass import score_tokens
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import Sample

LABELS, GROUPS = [0.9, -1.1, -0.4, 1.3, 0.6, -0.8], [0, 0, 1, 1, 2, 2]


def build_near(noise: float = 0.4) -> list[Sample]:
    """Samples whose recorded logprobs differ from the model's by `noise` nats."""
    return build_off_policy(build_trainable(), LABELS, GROUPS, noise=noise, seed=1)[0]


def test_gmpo_has_the_gradient_of_the_geometric_mean():
    samples = build_near()
    old = gather_old(samples)

    def compute(rows):
        losses = []
        for row, before, advantage in zip(rows, old, LABELS, strict=True):
            sign = math.copysign(1, advantage)
            ratio = (row - before).exp() ** sign
            clipped = torch.minimum(ratio, ratio.clamp(math.exp(-0.4), math.exp(0.4))) ** sign
            losses.append(-advantage * clipped.prod() ** (1 / len(row)))
        return torch.stack(losses).mean()

    assert_equal_to(AlgorithmSection(algorithm_type="gmpo"), samples, compute)


def test_luspo_multiplies_the_clipped_sequence_ratio_by_the_length():
    """With a noise that leaves some sequences within the bounds."""
    samples, clipped = build_near(noise=0.006), set()
    old = gather_old(samples)

    def compute(rows):
        losses = []
        for row, before, advantage in zip(rows, old, LABELS, strict=True):
            s = (row - before).mean().exp()
            bounded = s.clamp(1 - 2e-3, 1 + 2.5e-3)
            losses.append(-len(row) * torch.minimum(s * advantage, bounded * advantage))
            clipped.add(bool(bounded * advantage < s * advantage))
        return torch.stack(losses).mean()

    assert_equal_to(AlgorithmSection(algorithm_type="luspo"), samples, compute)
    assert clipped == {True, False}


def test_vespo_weights_the_policy_gradient_of_sequences():
    samples = build_near(noise=0.2)
    old = gather_old(samples)

    def compute(rows):
        losses = []
        for row, before, advantage in zip(rows, old, LABELS, strict=True):
            w = (row.detach() - before).exp().prod()
            exponent, decay = (2, 3) if advantage >= 0 else (3, 2)
            losses.append(-(w**exponent) * (decay * (1 - w)).exp() * advantage * row.sum())
        return torch.stack(losses).mean()

    assert_equal_to(AlgorithmSection(algorithm_type="vespo"), samples, compute)


@torch.no_grad()
def score_entropies(model, sample: Sample) -> torch.Tensor:
    """Entropies at the sampled tokens, from whole logits."""
    logprobs = model(input_ids=torch.tensor([sample.token_ids])).logits[0].log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return torch.stack([entropies[time - 1] for time in np.flatnonzero(sample.is_sampled).tolist()])


def find_top(entropies: torch.Tensor, is_real: torch.Tensor, fraction: float) -> torch.Tensor:
    """True for the tokens whose entropy is at least the k-th largest."""
    values = sorted(entropies[is_real].tolist(), reverse=True)
    return (entropies >= values[math.ceil(fraction * len(values)) - 1] - 1e-9) & is_real


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("fraction", [0.2, 0.5])
def test_the_policy_loss_is_that_of_the_tokens_of_highest_entropy(fraction, aggregation):
    """Masked tokens stay in the denominator; the KL and the entropy bonus are those of all tokens."""
    model, reference, samples = build_trainable(), build_frozen(1), build_near()
    tokens = read_tokens(model, samples, reference=reference)
    entropies = pad(samples, [score_entropies(model, sample) for sample in samples])
    kept = find_top(entropies, tokens.is_real, fraction)
    assert 0 < kept.sum() < tokens.is_real.sum()
    losses = kept * compute_ppo_losses(tokens, tokens.sampler) + 0.3 * estimate_kl(tokens, "k2")
    loss = aggregate(losses, tokens.is_real, aggregation)
    loss.backward()
    expected = loss.item(), take_gradient(model)
    section = AlgorithmSection(
        algorithm_type="grpo", top_entropy_fraction=fraction, loss_aggregation=aggregation, kl_coef=0.3
    )
    for packing in (EXACT, *PACKINGS):
        found, prepared = run(model, samples, section, packing=packing, chunk_tokens=3)
        assert_same(found, expected)
        share = kept.sum().item() / tokens.is_real.sum().item()
        assert prepared.inputs.metrics["train/entropy_masked_frac"] == pytest.approx(1 - share)
        assert prepared.inputs.metrics["train/entropy_threshold"] == pytest.approx(entropies[kept].min().item())


def test_the_mask_by_entropy_applies_with_corrections():
    model = build_trainable()
    samples, proximal = build_off_policy(model, LABELS, GROUPS, seed=1)
    correction = {"importance": "token", "cap": 1.2, "floor": 0.9, "mask": {"level": "token", "low": 0.8, "high": 1.3}}
    tokens = read_tokens(model, samples, proximal=proximal)
    entropies = pad(samples, [score_entropies(model, sample) for sample in samples])
    kept = find_top(entropies, tokens.is_real, 0.5)
    old, weights, is_kept = correct(tokens, correction)
    assert (kept & is_kept).any() and (kept & ~is_kept).any() and (~kept & is_kept).any()
    loss = aggregate(kept * weights * is_kept * compute_ppo_losses(tokens, old), tokens.is_real, "token-mean")
    loss.backward()
    expected = loss.item(), take_gradient(model)
    section = AlgorithmSection(algorithm_type="grpo", top_entropy_fraction=0.5, correction=correction)
    for packing in (EXACT, *PACKINGS):
        assert_same(run(model, samples, section, packing=packing, proximal=proximal)[0], expected)


def test_the_entropy_bonus_is_that_of_all_tokens():
    """With advantages of 0 the loss is the bonus alone."""
    model, samples = build_trainable(), build_off_policy(build_trainable(), [0.0] * 6, GROUPS)[0]
    every = run(model, samples, AlgorithmSection(algorithm_type="grpo", entropy_coef=0.1))[0]
    section = AlgorithmSection(algorithm_type="grpo", entropy_coef=0.1, top_entropy_fraction=0.2)
    assert_same(run(model, samples, section)[0], every)
    assert every[1].norm() > 0


@pytest.mark.parametrize("name", ["dapo", "gspo", "gmpo", "m2po", "rec", "clip_cov", "kl_cov", "ppo", "mix", "jsd"])
def test_the_mask_by_entropy_does_not_depend_on_packing(name):
    """On samples of several distributions, of which many share their first tokens."""
    model, samples = build_trainable(), build_near_samples(build_trainable())
    if name == "mix":
        samples = [replace(each, is_expert=each.trajectory_index % 3 == 0) for each in samples]
    section = AlgorithmSection(algorithm_type=name, top_entropy_fraction=0.3)
    expected, prepared = run(model, samples, section)
    assert 0.6 < prepared.inputs.metrics["train/entropy_masked_frac"] <= 0.7
    if name == "mix":
        assert (prepared.inputs.correction_E[prepared.inputs.is_expert_E == 1] == 0.1).all()
    for packing in PACKINGS:
        found, again = run(model, samples, section, packing=packing, chunk_tokens=3)
        assert_same(found, expected, tolerance=1e-9)
        assert again.inputs.metrics == pytest.approx(prepared.inputs.metrics, rel=1e-9)


def test_scored_entropies_are_those_of_the_sampling_distributions():
    """In the order of the events, and equal to the entropies of the loss pass."""
    model, samples = build_trainable(), build_samples()
    rows = pack_samples(samples, hidden_size=32, **EXACT)
    _, entropies_R = score_tokens(model, samples, rows, chunk_tokens=5)
    places = [place for row in rows for place in zip(row.sample_E.tolist(), row.time_E.tolist(), strict=True)]
    for (index, time), entropy in zip(places, entropies_R, strict=True):
        sample = samples[index]
        with torch.no_grad():
            log_p = score_naively(model, sample, time, model(input_ids=torch.tensor([sample.token_ids])).logits[0])
        assert entropy == pytest.approx(-(log_p.exp() * log_p.nan_to_num(neginf=0.0)).sum().item(), abs=1e-9)
    assert len(set(np.round(entropies_R, 6))) > 10


def test_the_threshold_is_that_of_each_update_and_of_the_current_policy():
    """Two minibatches with a critic: the second update scores the policy that the first has changed."""
    samples, thresholds = build_near(), []
    for learning_rate in (1e-15, 0.5):
        trainer = Trainer(
            build_trainable(),
            TrainerSection(learning_rate=learning_rate, num_minibatches=2, mismatch_warn=1e9, mismatch_stop=1e9),
            AlgorithmSection(algorithm_type="ppo", top_entropy_fraction=0.2),
            max_model_len=64, num_total_steps=9, critic_model=build_value_model(),
        )  # fmt: skip
        thresholds.append(trainer.step(samples)["train/entropy_threshold"])
    parts = [[sample for sample in samples if sample.group_index % 2 == turn] for turn in range(2)]
    expected = []
    for part in parts:
        model = build_trainable()
        entropies = torch.cat([score_entropies(model, sample) for sample in part])
        expected.append(sorted(entropies.tolist())[-math.ceil(0.2 * len(entropies))])
    assert thresholds[0] == pytest.approx(np.mean(expected))
    assert abs(thresholds[1] - thresholds[0]) > 1e-3
