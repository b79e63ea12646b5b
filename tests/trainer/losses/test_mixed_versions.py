"""One update on sequences whose tokens were sampled by several versions, against a loss written out with autograd."""

from __future__ import annotations

from dataclasses import replace

import torch
from test_algorithm_gradients import build_batch, score_plainly
from test_gradients import take_gradient

from trainable_models import build_shallow
from tunesmith.config import AlgorithmSection, TrainerSection
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import Sample

NEWEST, CAP = 3, 2.0


def build_mixed(models) -> list[Sample]:
    """Samples whose versions rise within each sequence, with the logprobs under the weights of each version."""
    samples = build_batch([1.0, -0.7, 0.4, -1.2, 0.9, -0.3], [0, 0, 0, 1, 1, 1])
    mixed = []
    for number, sample in enumerate(samples):
        scored = [score_plainly(model, sample).tolist() for model in models]
        versions, logprobs = [None] * len(sample.token_ids), [0.0] * len(sample.token_ids)
        times = [time for time, is_sampled in enumerate(sample.is_sampled) if is_sampled]
        for place, time in enumerate(times):
            age = min((len(times) - 1 - place) // 2 + number % 2, len(models) - 1)
            versions[time], logprobs[time] = NEWEST - age, scored[age][place]
        mixed.append(replace(sample, policy_versions=tuple(versions), logprobs=tuple(logprobs)))
    return mixed


def test_the_gradient_is_that_of_the_corrected_loss(monkeypatch):
    """Loss: -mean over tokens of min(p / q, cap) A log p, with q the recorded logprob, and 1 for the newest version.

    The first update of a step starts at the proximal policy, so the ratio of the clipped loss is 1.
    """
    with torch.no_grad():
        models = [build_shallow(seed=0)]
        for age in (1, 2):
            models.append(build_shallow(seed=0))
            generator = torch.Generator().manual_seed(age)
            for parameter in models[-1].parameters():
                parameter += 0.1 * age * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        samples = build_mixed(models)
    assert {v for s in samples for v in s.policy_versions} == {None, 1, 2, 3}
    assert any(len(set(s.policy_versions) - {None}) > 1 for s in samples)

    reference = build_shallow(seed=0)
    terms, weights = [], []
    for sample in samples:
        logprobs = score_plainly(reference, sample)
        recorded = [pair for pair in zip(sample.logprobs, sample.advantages, sample.is_sampled, strict=True) if pair[2]]
        old = torch.tensor([logprob for logprob, *_ in recorded], dtype=torch.float64)
        advantages = torch.tensor([advantage for _, advantage, _ in recorded], dtype=torch.float64)
        weight = (logprobs.detach() - old).exp().clamp(max=CAP)
        weights.append(weight)
        terms.append(weight * advantages * logprobs)
    (-torch.cat(terms).mean()).backward()
    expected = take_gradient(reference)

    model, gradients = build_shallow(seed=0), []
    section = AlgorithmSection(algorithm_type="grpo", correction={"cap": CAP})
    trainer = Trainer(model, TrainerSection(), section, max_model_len=64, num_total_steps=1)
    monkeypatch.setattr(trainer._optimizer, "update", lambda **_: gradients.append(take_gradient(model)))
    metrics = trainer.step(samples, policy_version=NEWEST)
    weight = torch.cat(weights)
    assert (weight != 1).double().mean() > 0.05 and (weight == CAP).any()
    assert abs(metrics["correction/mean_weight"] - weight.mean().item()) < 1e-4
    assert (gradients[0] - expected).norm() < 1e-5 * expected.norm()
    assert metrics["mismatch/max_log_ratio"] < 1e-4, "the mismatch is measured on tokens of the newest version"


def test_the_newest_version_is_that_of_the_whole_step():
    """The first of two minibatches has only tokens of an older version, whose mismatch is not measured."""
    samples = build_batch([1.0, -0.7, 0.4, -1.2], [0, 0, 1, 1])
    samples = [
        replace(each, policy_versions=tuple(each.group_index if m else None for m in each.is_sampled))
        for each in samples
    ]
    settings = TrainerSection(num_minibatches=2, mismatch_warn=1e9, mismatch_stop=1e9)
    metrics = [
        Trainer(
            build_shallow(), settings, AlgorithmSection(algorithm_type="grpo"), max_model_len=64, num_total_steps=9
        ).step(samples, policy_version=version)
        for version in (None, 1)
    ]
    assert metrics[0] == metrics[1] and "mismatch/kl" not in metrics[0]
