"""The gradient of a batch in float64, independent of packing, chunks and order.

The reference is a loop over plain forwards of single samples, token by token, with every formula written out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest
import torch
from transformers import PreTrainedModel

from sample_spans import build_spans, list_distributions
from tiny_models import CONFIGS
from trainable_models import build_trainable
from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.config import AlgorithmSection
from tunesmith.trainer.layers.gradient_checkpointing import checkpointed_layers, enable_checkpointing
from tunesmith.trainer.loss_pass import PassSetup, run_loss_pass
from tunesmith.trainer.packing import pack_samples
from tunesmith.trainer.reference import Reference
from tunesmith.trainer.scoring_pass import ScoringModels
from tunesmith.trainer.update import prepare_update
from tunesmith.types import Distribution, Sample

NORM_LENGTH = 40
AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
DISTRIBUTIONS = [Distribution(), Distribution(temperature=0.7), Distribution(temperature=1.4, top_k=30)]


def build_samples(seed: int = 0) -> list[Sample]:
    """Groups that share prompts, turns and whole answers; trajectories with branches; two sampling settings."""
    rng = random.Random(seed)
    samples, trajectory = [], 0
    for group in range(3):
        prompt = [rng.randrange(97) for _ in range(rng.randrange(3, 9))]
        common = [rng.randrange(97) for _ in range(4)]
        for _ in range(4):
            for _ in range(rng.choice([1, 1, 2])):
                answer = common[: rng.randrange(5)] + [rng.randrange(97) for _ in range(rng.randrange(1, 6))]
                tool = [rng.randrange(97) for _ in range(3)]
                last = [rng.randrange(97) for _ in range(rng.randrange(3))]
                mask = [False] * len(prompt) + [True] * len(answer) + [False] * 3 + [True] * len(last)
                samples.append(build_sample(prompt + answer + tool + last, mask, group, trajectory, rng))
            trajectory += 1
    samples.append(samples[0])
    return samples


def build_sample(ids: list[int], mask: list[bool], group: int, trajectory: int, rng: random.Random) -> Sample:
    advantage, distribution = rng.choice([-1.5, -0.3, 0.8]), DISTRIBUTIONS[trajectory % 3]
    return Sample(
        token_ids=tuple(ids),
        is_sampled=tuple(mask),
        logprobs=tuple(-rng.uniform(0.5, 8) if m else 0.0 for m in mask),
        advantages=tuple(advantage if m else 0.0 for m in mask),
        policy_versions=tuple(0 if m else None for m in mask),
        distribution_spans=build_spans([distribution if m else None for m in mask]),
        group_index=group,
        trajectory_index=trajectory,
    )


def score_naively(model: PreTrainedModel, sample: Sample, time: int, logits: torch.Tensor) -> torch.Tensor:
    """Log-distribution [V] of one token, -1e9 at truncated tokens."""
    distribution = list_distributions(sample)[time]
    row = logits[time - 1] / distribution.temperature
    if distribution.top_k:
        is_kept = row >= row.topk(distribution.top_k).values[-1]
        is_kept[sample.token_ids[time]] = True
        row = row.masked_fill(~is_kept, -math.inf)
    return row.log_softmax(-1)


def compute_naive_loss(model: PreTrainedModel, samples: list[Sample], section: AlgorithmSection, reference=None):
    lengths: dict[int, int] = {}
    for sample in samples:
        lengths[sample.trajectory_index] = lengths.get(sample.trajectory_index, 0) + sum(sample.is_sampled)
    lengths = {trajectory: length for trajectory, length in lengths.items() if length}
    loss = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        ids = torch.tensor([sample.token_ids])
        logits = model(input_ids=ids).logits[0]
        for time in (time for time, is_sampled in enumerate(sample.is_sampled) if is_sampled):
            weight = {
                "token-mean": 1 / sum(lengths.values()),
                "seq-mean-token-sum": 1 / len(lengths),
                "seq-mean-token-mean": 1 / len(lengths) / lengths[sample.trajectory_index],
                "seq-mean-token-sum-norm": 1 / len(lengths) / NORM_LENGTH,
            }[section.loss_aggregation]
            log_distribution = score_naively(model, sample, time, logits)
            logp = log_distribution[sample.token_ids[time]]
            advantage, ratio = sample.advantages[time], (logp - sample.logprobs[time]).exp()
            token_loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            if advantage < 0:
                token_loss = torch.minimum(token_loss, torch.tensor(-advantage * 3.0, dtype=torch.float64))
            kept = log_distribution[log_distribution.isfinite()]
            token_loss = token_loss + section.entropy_coef * (kept.exp() * kept).sum()
            if reference is not None:
                with torch.no_grad():
                    reference_logits = reference(input_ids=ids).logits[0]
                d = logp - score_naively(reference, sample, time, reference_logits)[sample.token_ids[time]]
                kl = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[section.kl_estimator]
                token_loss = token_loss + section.kl_coef * kl
            loss = loss + weight * token_loss
    return loss


def take_gradient(model: PreTrainedModel) -> torch.Tensor:
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.requires_grad])
    model.zero_grad()
    return gradient


def run_ours(
    model, samples: Iterable[Sample], section, *, max_tokens=10_000, has_sharing=True, chunk_tokens=1000, reference=None
) -> tuple[float, torch.Tensor]:
    samples = list(samples)
    rows = pack_samples(samples, max_tokens_per_row=max_tokens, has_prefix_sharing=has_sharing, hidden_size=32)
    algorithm = resolve_algorithm(section)
    setup = PassSetup(
        model=model,
        norm_length=NORM_LENGTH,
        chunk_tokens=chunk_tokens,
        scoring_models=ScoringModels(reference=None if reference is None else Reference(reference)),
    )
    prepared = prepare_update(
        setup,
        algorithm,
        samples,
        rows,
    )
    totals = run_loss_pass(setup, algorithm, samples, rows, prepared.inputs)
    return totals["train/loss"][1].item(), take_gradient(model)


def assert_same(ours: tuple[float, torch.Tensor], theirs: tuple[float, torch.Tensor], tolerance: float = 1e-10):
    assert ours[0] == pytest.approx(theirs[0], rel=tolerance)
    assert (ours[1] - theirs[1]).norm() <= tolerance * theirs[1].norm()


def run_naively(model, samples, section, reference=None) -> tuple[float, torch.Tensor]:
    loss = compute_naive_loss(model, samples, section, reference)
    loss.backward()
    return loss.item(), take_gradient(model)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("name", "is_tied"), [("llama", True), ("qwen3", False)])
def test_gradient_equals_that_of_a_naive_loop(name, is_tied, aggregation):
    model, samples = build_trainable(name, is_tied=is_tied), build_samples()
    section = AlgorithmSection(loss_aggregation=aggregation)
    assert_same(run_ours(model, samples, section), run_naively(model, samples, section))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradient_with_kl_and_entropy_equals_that_of_a_naive_loop(estimator):
    model, reference = build_trainable(), build_trainable(seed=1)
    section = AlgorithmSection(
        loss_aggregation="seq-mean-token-mean", kl_coef=0.1, kl_estimator=estimator, entropy_coef=0.05
    )
    samples = build_samples(1)[:6]
    ours = run_ours(model, samples, section, reference=reference, chunk_tokens=5)
    assert_same(ours, run_naively(model, samples, section, reference))
    assert all(parameter.grad is None for parameter in reference.parameters())


@pytest.mark.parametrize(("name", "aggregation"), [("qwen3", "token-mean"), *(("llama", a) for a in AGGREGATIONS)])
def test_gradient_does_not_depend_on_packing(name, aggregation):
    model, samples = build_trainable(name), build_samples(2)
    section = AlgorithmSection(loss_aggregation=aggregation, entropy_coef=0.01)
    expected = run_ours(model, samples, section)
    for has_sharing in (True, False):
        for max_tokens, chunk_tokens in ((1, 1000), (25, 3), (60, 1000), (10_000, 7)):
            options = {"max_tokens": max_tokens, "has_sharing": has_sharing, "chunk_tokens": chunk_tokens}
            assert_same(run_ours(model, samples, section, **options), expected)


def test_gradient_does_not_depend_on_the_order_of_samples():
    model, samples, section = build_trainable(), build_samples(3), AlgorithmSection()
    assert_same(run_ours(model, samples[::-1], section, max_tokens=40), run_ours(model, samples, section))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_gradient_checkpointing_does_not_change_the_gradient(name):
    model, samples, section = build_trainable(name), build_samples(4), AlgorithmSection()
    expected = run_ours(model, samples, section)
    num_layer_runs = []
    model.get_decoder().layers[0].self_attn.register_forward_hook(lambda *_: num_layer_runs.append(1))
    enable_checkpointing(model)
    with checkpointed_layers(model):
        checkpointed = run_ours(model, samples, section)
    assert_same(checkpointed, expected)
    assert len(num_layer_runs) == 2
    assert not any(module.training for module in model.modules())


OTHERS = [name for name in CONFIGS if name not in ("llama", "qwen3")]


@pytest.mark.parametrize("name", OTHERS)
def test_gradient_of_other_architectures_equals_that_of_a_naive_loop(name):
    """Sliding windows, caps on scores and logits, experts; these compute parts in float32 for all model dtypes."""
    model, samples, section = build_trainable(name), build_samples(5), AlgorithmSection(loss_aggregation="token-mean")
    expected = run_naively(model, samples, section)
    for has_sharing in (True, False):
        ours = run_ours(model, samples, section, has_sharing=has_sharing, max_tokens=80)
        assert_same(ours, expected, tolerance=2e-6)
