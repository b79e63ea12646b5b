"""Whole updates in float64 against autograd of textbook losses on plain forwards, for several packings.

The reference scores every sample separately and computes each algorithm's loss as one expression of all logprobs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from test_gradients import NORM_LENGTH, assert_same, take_gradient
from torch.nn import functional
from transformers import PreTrainedModel

from sample_spans import build_spans
from trainable_models import build_shallow
from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.config import AlgorithmSection
from tunesmith.trainer.loss_pass import PassSetup, run_loss_pass
from tunesmith.trainer.packing import pack_samples
from tunesmith.trainer.reference import Reference
from tunesmith.trainer.scoring_pass import ScoringModels
from tunesmith.trainer.update import prepare_update
from tunesmith.types import Distribution, Sample

PACKINGS = [
    {},
    {"max_tokens": 25, "chunk_tokens": 3},
    {"has_sharing": False, "max_tokens": 40},
    {"has_sharing": False, "max_tokens": 1, "chunk_tokens": 2},
]


def build_batch(labels: list[float], groups: list[int], *, experts: tuple[int, ...] = (), seed: int = 0):
    """One trajectory per label, every third with two samples; trajectories of a group share their prompt."""
    rng = random.Random(seed)
    prompts = {group: [rng.randrange(97) for _ in range(rng.randrange(2, 6))] for group in groups}
    samples = []
    for trajectory, (label, group) in enumerate(zip(labels, groups, strict=True)):
        for _ in range(2 if trajectory % 3 == 2 else 1):
            answer = [rng.randrange(97) for _ in range(rng.randrange(1, 7))]
            tool, last = [rng.randrange(97)] * 2, [rng.randrange(97) for _ in range(rng.randrange(2))]
            mask = [False] * len(prompts[group]) + [True] * len(answer) + [False] * 2 + [True] * len(last)
            is_expert = trajectory in experts
            samples.append(
                Sample(
                    token_ids=tuple(prompts[group] + answer + tool + last),
                    is_sampled=tuple(mask),
                    logprobs=tuple(-rng.uniform(0.5, 8) if m and not is_expert else 0.0 for m in mask),
                    advantages=tuple(label if m else 0.0 for m in mask),
                    policy_versions=tuple(0 if m else None for m in mask),
                    distribution_spans=build_spans([Distribution() if m else None for m in mask]),
                    group_index=group,
                    trajectory_index=trajectory,
                    is_expert=is_expert,
                )
            )
    return samples


def score_plainly(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    """Logprobs of the trained tokens."""
    logprobs = model(input_ids=torch.tensor([sample.token_ids])).logits[0].log_softmax(-1)
    times = [time for time, is_sampled in enumerate(sample.is_sampled) if is_sampled]
    return torch.stack([logprobs[time - 1, sample.token_ids[time]] for time in times])


def score_trajectories(model: PreTrainedModel, samples: list[Sample]) -> list[torch.Tensor]:
    rows: dict[int, list[torch.Tensor]] = {}
    for sample in samples:
        rows.setdefault(sample.trajectory_index, []).append(score_plainly(model, sample))
    return [torch.cat(parts) for parts in rows.values()]


def gather_old(samples: list[Sample]) -> list[torch.Tensor]:
    rows: dict[int, list[float]] = {}
    for sample in samples:
        pairs = zip(sample.logprobs, sample.is_sampled, strict=True)
        rows.setdefault(sample.trajectory_index, []).extend(value for value, is_sampled in pairs if is_sampled)
    return [torch.tensor(row, dtype=torch.float64) for row in rows.values()]


def assert_equal_to(
    section: AlgorithmSection,
    samples: list[Sample],
    compute: Callable[[list[torch.Tensor]], torch.Tensor],
    reference: PreTrainedModel | None = None,
    **extra_models,
) -> None:
    """`compute` returns the loss from the logprobs of each trajectory."""
    model = build_shallow()
    loss = compute(score_trajectories(model, samples))
    loss.backward()
    expected = loss.item(), take_gradient(model)
    algorithm = resolve_algorithm(section)
    for options in PACKINGS:
        rows = pack_samples(
            samples, max_tokens_per_row=options.get("max_tokens", 10_000),
            has_prefix_sharing=options.get("has_sharing", True), hidden_size=32,
        )  # fmt: skip
        chunk_tokens = options.get("chunk_tokens", 1000)
        setup = PassSetup(
            model=model,
            norm_length=NORM_LENGTH,
            chunk_tokens=chunk_tokens,
            scoring_models=ScoringModels(reference=None if reference is None else Reference(reference), **extra_models),
        )
        prepared = prepare_update(
            setup,
            algorithm,
            samples,
            rows,
        )
        totals = run_loss_pass(setup, algorithm, samples, rows, prepared.inputs)
        assert_same((totals["train/loss"][1].item(), take_gradient(model)), expected)


@torch.no_grad()
def score_with(model: PreTrainedModel, samples: list[Sample]) -> list[torch.Tensor]:
    return score_trajectories(model, samples)


def ppo_losses(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor | float) -> torch.Tensor:
    advantages = torch.as_tensor(advantages, dtype=torch.float64).expand(len(logprobs))
    ratio = (logprobs - old).exp()
    upper = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    return torch.where(advantages < 0, torch.minimum(upper, -3 * advantages), upper)


def test_dpo_equals_the_textbook_gradient():
    samples, reference = build_batch([1, -1, 1, -1, -1, 1], [0, 0, 1, 1, 2, 2]), build_shallow(seed=1)
    fixed = [row.sum() for row in score_with(reference, samples)]

    def compute(rows):
        r = [row.sum() - ref for row, ref in zip(rows, fixed, strict=True)]
        margins = torch.stack([r[0] - r[1], r[2] - r[3], r[5] - r[4]])
        return -functional.logsigmoid(0.3 * margins).mean()

    section = AlgorithmSection(algorithm_type="dpo", terms_args={"beta": 0.3})
    assert_equal_to(section, samples, compute, reference=reference)


@pytest.mark.parametrize("loss_type", ["ipo", "hinge", "robust"])
def test_dpo_forms_equal_the_textbook_gradient(loss_type):
    samples, reference = build_batch([1, -1, 1, -1, -1, 1], [0, 0, 1, 1, 2, 2]), build_shallow(seed=1)
    fixed = [row.sum() for row in score_with(reference, samples)]

    def compute(rows):
        r = [row.sum() - ref for row, ref in zip(rows, fixed, strict=True)]
        gaps = torch.stack([r[0] - r[1], r[2] - r[3], r[5] - r[4]])
        if loss_type == "ipo":
            return (gaps - 1 / 0.6).square().mean()
        if loss_type == "hinge":
            return (1 - 0.3 * gaps).relu().mean()
        return ((-0.9 * functional.logsigmoid(0.3 * gaps) + 0.1 * functional.logsigmoid(-0.3 * gaps)) / 0.8).mean()

    args = {"beta": 0.3, "loss_type": loss_type} | ({"label_smoothing": 0.1} if loss_type == "robust" else {})
    assert_equal_to(AlgorithmSection(algorithm_type="dpo", terms_args=args), samples, compute, reference=reference)


@pytest.mark.parametrize("name", ["orpo", "simpo"])
def test_losses_without_a_reference_equal_the_textbook_gradient(name):
    samples = build_batch([1, -1, 1, -1, -1, 1], [0, 0, 1, 1, 2, 2])

    def compute(rows):
        a = torch.stack([row.mean() for row in rows])
        chosen, rejected = a[[0, 2, 5]], a[[1, 3, 4]]
        if name == "simpo":
            return -functional.logsigmoid(2.5 * (chosen - rejected) - 0.5).mean()
        odds = [p / (1 - p) for p in (chosen.exp(), rejected.exp())]
        return (-chosen - 0.5 * functional.logsigmoid((odds[0] / odds[1]).log())).mean()

    args = {"beta": 2.5, "gamma": 0.5} if name == "simpo" else {"odds_coef": 0.5}
    assert_equal_to(AlgorithmSection(algorithm_type=name, terms_args=args), samples, compute)


def test_kto_equals_the_textbook_gradient():
    samples = build_batch([1, -1, 1, -1, 0, 0, 0, 0], [0, 1, 2, 3, 0, 1, 2, 3], seed=3)
    reference = build_shallow(seed=1)
    fixed = [row.sum() for row in score_with(reference, samples)]

    def compute(rows):
        r = torch.stack([row.sum() - ref for row, ref in zip(rows, fixed, strict=True)])
        z = r[4:].mean().clamp(min=0).detach()
        assert z > 0
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
        weights = torch.tensor([1.0, 1.5, 1.0, 1.5], dtype=torch.float64)
        return (weights * (1 - torch.sigmoid(0.05 * signs * (r[:4] - z)))).mean()

    section = AlgorithmSection(algorithm_type="kto", terms_args={"beta": 0.05, "undesirable_weight": 1.5})
    assert_equal_to(section, samples, compute, reference=reference)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("name", ["mix", "mix_chord"])
def test_mixtures_aggregate_sampled_and_expert_tokens_separately(name, aggregation):
    samples = build_batch([0.7, -1.0, -0.4, 0.0, 0.0], [0, 0, 1, 2, 3], experts=(3, 4))
    old = gather_old(samples)

    def imitate(row):
        p = row.detach().exp()
        return -row * (p * (1 - p) if name == "mix_chord" else 1.0)

    def compute(rows):
        own = [ppo_losses(rows[i], old[i], advantage) for i, advantage in enumerate((0.7, -1.0, -0.4))]
        experts = [imitate(row) for row in rows[3:]]
        if aggregation == "token-mean":
            return 0.75 * torch.cat(own).mean() + 0.25 * torch.cat(experts).mean()
        own, experts = ([losses.mean() for losses in kind] for kind in (own, experts))
        return 0.75 * torch.stack(own).mean() + 0.25 * torch.stack(experts).mean()

    mu = {"mu": 0.25} if name == "mix" else {"mu_peak": 0.25}
    section = AlgorithmSection(algorithm_type=name, terms_args=mu, loss_aggregation=aggregation)
    assert_equal_to(section, samples, compute)


def test_kl_of_a_mixture_excludes_expert_tokens():
    samples, reference = build_batch([0.7, -1.0, 0.0], [0, 0, 1], experts=(2,)), build_shallow(seed=1)
    old, fixed = gather_old(samples), score_with(reference, samples)

    def compute(rows):
        own = [ppo_losses(rows[i], old[i], advantage) for i, advantage in enumerate((0.7, -1.0))]
        kl = [(row - ref) ** 2 / 2 for row, ref in zip(rows[:2], fixed[:2], strict=True)]
        return 0.9 * torch.cat(own).mean() - 0.1 * rows[2].mean() + 0.3 * torch.cat(kl).mean()

    assert_equal_to(AlgorithmSection(algorithm_type="mix", kl_coef=0.3), samples, compute, reference=reference)


@pytest.mark.parametrize(("name", "beta"), [("on_policy_distill", 1.0), ("jsd", 0.3)])
def test_distillation_advantages_use_the_teacher(name, beta):
    samples, teacher = build_batch([0.0, 1.0, 5.0], [0, 0, 1]), build_shallow(seed=2)
    old, fixed = gather_old(samples), score_with(teacher, samples)

    def compute(rows):
        losses = []
        for row, s, t in zip(rows, old, fixed, strict=True):
            mixture = torch.logaddexp(t + math.log(beta), s + math.log(1 - beta)) if beta < 1 else t
            losses.append(ppo_losses(row, s, 0.5 * (mixture - s)))
        return torch.cat(losses).mean()

    args = {"kl_coef": 0.5} | ({"beta": beta} if name == "jsd" else {})
    assert_equal_to(AlgorithmSection(algorithm_type=name, terms_args=args), samples, compute, teacher=teacher)


def test_reinforce_plus_plus_discounts_over_all_samples_of_a_run():
    samples = build_batch([1.0, 0.0, 0.5], [0, 0, 1])
    old = gather_old(samples)
    assert len(samples) == 4

    def compute(rows):
        rewards = [1.0, 0.0, 0.5]
        returns = [
            reward * 0.9 ** torch.arange(len(row) - 1, -1, -1, dtype=torch.float64)
            for reward, row in zip(rewards, rows, strict=True)
        ]
        flat = torch.cat(returns)
        advantages = ((flat - flat.mean()) / (flat.var() + 1e-8).sqrt()).split([len(row) for row in rows])
        return torch.cat([ppo_losses(*each) for each in zip(rows, old, advantages, strict=True)]).mean()

    section = AlgorithmSection(algorithm_type="reinforceplusplus", terms_args={"gamma": 0.9})
    assert_equal_to(section, samples, compute)
