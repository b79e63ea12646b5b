"""Losses with corrections, masks, KL estimators, experts and a critic, against formulas on padded tensors."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from padded import (
    LOSSES,
    TERMS_ARGS,
    UPDATES,
    aggregate,
    build_off_policy,
    compute_ppo_losses,
    correct,
    estimate_kl,
    read_tokens,
)
from test_critic import build_value_model, compute_values_naively
from test_gradients import assert_same, take_gradient
from test_trainer import read_parameters

from trainable_models import build_frozen, build_shallow
from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.algorithms.scores import TokenLosses, TokenScores
from tunesmith.algorithms.table import ALGORITHMS
from tunesmith.config import AlgorithmSection, CriticSection, TrainerSection
from tunesmith.trainer.loss_pass import PassSetup, run_loss_pass
from tunesmith.trainer.packing import pack_samples
from tunesmith.trainer.reference import Reference
from tunesmith.trainer.scoring_pass import ScoringModels
from tunesmith.trainer.trainer import Trainer
from tunesmith.trainer.update import StepScores, prepare_update

LABELS, GROUPS = [0.9, -1.1, -0.4, 1.3, 0.6, -0.8], [0, 0, 1, 1, 2, 2]
COMPUTATIONS = [
    {"max_tokens_per_row": 10_000, "has_prefix_sharing": True, "chunk_tokens": 1000},
    {"max_tokens_per_row": 18, "has_prefix_sharing": False, "chunk_tokens": 3},
]
WIDE = {"level": "token", "low": 0.0, "high": 1e9}
CORRECTIONS = {
    "none": {},
    "wide mask": {"mask": WIDE},
    "tokens masked": {"mask": {"level": "token", "low": 0.8, "high": 1.3}},
    "sequences masked": {"mask": {"level": "sequence", "low": 0.6, "high": 1.5}},
    "geometric means masked": {"mask": {"level": "geometric", "low": 0.9, "high": 1.15}},
    "weights of tokens": {"importance": "token", "cap": 1.2},
    "weights with a lower bound": {"importance": "token", "cap": 1.3, "floor": 0.9},
    "weights of sequences": {"importance": "sequence", "cap": 1.5},
    "weights and mask": {"importance": "token", "mask": {"level": "token", "low": 0.8, "high": 1.3}},
    "strayed sequences": {"negative_sequence_delta": 0.02},
}
LOOSE = {"mismatch_warn": 1e9, "mismatch_stop": 1e9}
STILL = {**LOOSE, "learning_rate": 1e-15}
"""So small that all updates of a step have the same policy."""


@functools.cache
def load_off_policy():
    """Samples of the model without a seed, and their proximal scores."""
    return build_off_policy(build_shallow(), LABELS, GROUPS, seed=1)


@functools.cache
def load_tokens():
    """A model, its reference, and the scores of the samples with a graph that gradients are taken through again."""
    model, reference = build_shallow(), build_frozen(1)
    samples, proximal = load_off_policy()
    return model, reference, read_tokens(model, samples, proximal=proximal, reference=reference)


def compute_expected(model, tokens, section: AlgorithmSection, correction: dict):
    lose, aggregation, _ = LOSSES[section.algorithm_type]
    old, weights, is_kept = correct(tokens, correction)
    losses = weights * is_kept * lose(tokens, old)
    if section.kl_coef > 0:
        losses = losses + section.kl_coef * estimate_kl(tokens, section.kl_estimator)
    loss = aggregate(losses, tokens.is_real, aggregation)
    loss.backward(retain_graph=True)
    return (loss.item(), take_gradient(model)), is_kept[tokens.is_real]


def run_package(model, samples, section, *, proximal, reference=None, chunk_tokens, **packing):
    algorithm, rows = resolve_algorithm(section), pack_samples(samples, hidden_size=32, **packing)
    setup = PassSetup(
        model=model,
        norm_length=1,
        chunk_tokens=chunk_tokens,
        scoring_models=ScoringModels(reference=None if reference is None else Reference(reference)),
    )
    prepared = prepare_update(
        setup,
        algorithm,
        samples,
        rows,
        scores=proximal,
    )
    totals = run_loss_pass(setup, algorithm, samples, rows, prepared.inputs)
    return (totals["train/loss"][1].item(), take_gradient(model)), prepared.inputs.metrics


def choose_proximal(proximal: StepScores, correction: dict) -> StepScores:
    """The proximal scores that the trainer would pass."""
    is_weighted = correction.get("importance", "none") != "none"
    return replace(proximal, is_weighted=is_weighted) if is_weighted or "mask" in correction else StepScores()


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_corrections_of_every_loss_equal_the_formula(name, kind):
    """Masked tokens stay in the denominator of the aggregation; without weights the ratio is against the sampler.

    Every loss and every correction is computed in both ways of `COMPUTATIONS`, each pair of them in one.
    """
    (model, _, tokens), correction = load_tokens(), CORRECTIONS[kind]
    samples, proximal = load_off_policy()
    section = AlgorithmSection(
        algorithm_type=name, correction={"importance": "none", **correction}, loss_args=LOSSES[name][2],
        terms_args=TERMS_ARGS.get(name, {}),
    )  # fmt: skip
    expected, is_kept = compute_expected(model, tokens, section, correction)
    assert is_kept.all() == (kind in ("none", "wide mask") or kind.startswith("weights of") or "bound" in kind)
    options = COMPUTATIONS[(list(LOSSES).index(name) + list(CORRECTIONS).index(kind)) % 2]
    found, metrics = run_package(model, samples, section, proximal=choose_proximal(proximal, correction), **options)
    assert_same(found, expected)
    if "mask" in correction or "negative_sequence_delta" in correction:
        assert metrics["correction/masked_frac"] == pytest.approx(1 - is_kept.double().mean().item())


ESTIMATORS = ("k1", "k2", "k3", "abs", "corrected_k3")
KINDS = ("none", "tokens masked", "weights of tokens", "weights of sequences")
NAMES = ("grpo", "importance_sampling", "gspo")
KL_CASES = [
    (NAMES[(row + column) % len(NAMES)], estimator, kind)
    for (row, estimator), (column, kind) in itertools.product(enumerate(ESTIMATORS), enumerate(KINDS))
]
"""Each two of loss, estimator and correction meet."""


@pytest.mark.parametrize(("name", "estimator", "kind"), KL_CASES)
def test_kl_with_corrections_equals_the_formula(name, estimator, kind):
    """Weights and masks apply to the policy loss only; corrected_k3 always uses the sampler's logprobs."""
    (model, reference, tokens), correction = load_tokens(), CORRECTIONS[kind]
    samples, proximal = load_off_policy()
    section = AlgorithmSection(
        algorithm_type=name, correction={"importance": "none", **correction}, kl_coef=0.5, kl_estimator=estimator
    )
    expected, _ = compute_expected(model, tokens, section, correction)
    for options in COMPUTATIONS:
        found, _ = run_package(
            model, samples, section, proximal=choose_proximal(proximal, correction), reference=reference, **options
        )
        assert_same(found, expected)


def build_extra_models(name: str) -> dict:
    needs = resolve_algorithm(AlgorithmSection(algorithm_type=name)).needs
    return {
        "reference_model": build_frozen(1) if "reference" in needs else None,
        "teacher_model": build_frozen(2) if "teacher" in needs else None,
        "critic_model": build_value_model() if "values" in needs else None,
    }


def take_step(samples, section: AlgorithmSection, settings: dict, **extra_models):
    model = build_shallow()
    trainer = Trainer(model, TrainerSection(**settings), section, max_model_len=64, num_total_steps=9, **extra_models)
    return trainer.step(samples), read_parameters(model)


@pytest.mark.parametrize(
    ("name", "metric", "args"),
    [
        ("on_policy_distill", "distillation/reverse_kl", {}),
        ("jsd", "distillation/reverse_kl", {}),
        ("reinforceplusplus", "algorithm/return_mean", {}),
        ("vespo", "train/vespo_weight", {}),
        ("rloo", "train/reward_kl", {"reward_kl_coef": 0.1}),
    ],
)
def test_means_of_the_terms_are_over_the_tokens_of_a_step_with_one_update_or_several(name, metric, args):
    """Without a change of the weights; minibatches have unequal numbers of tokens and of rollouts."""
    samples, _ = build_off_policy(build_shallow(), LABELS[:5], [0, 0, 0, 1, 1])
    section = AlgorithmSection(algorithm_type=name, terms_args=args, correction={"importance": "none"})
    extra = build_extra_models(name) | ({"reference_model": build_frozen(1)} if args else {})
    one, two = (take_step(samples, section, {**STILL, "num_minibatches": n}, **extra)[0][metric] for n in (1, 2))
    assert two == pytest.approx(one, rel=1e-9) and one != 0


UNSUPERVISED = sorted(name for name in UPDATES if ALGORITHMS[name].compute_advantages is not None)


@pytest.mark.parametrize("name", UNSUPERVISED)
def test_a_mask_without_effect_changes_no_bit(name):
    """Over two updates, with sampler logprobs that differ by 0.4 nats."""
    experts = (4, 5) if name.startswith("mix") else ()
    samples, _ = build_off_policy(build_shallow(), LABELS, GROUPS, experts=experts)
    settings = {**LOOSE, "learning_rate": 1e-2, "num_minibatches": 2}
    plain, expected = take_step(samples, AlgorithmSection(algorithm_type=name), settings, **build_extra_models(name))
    section = AlgorithmSection(algorithm_type=name, correction={"mask": WIDE})
    metrics, found = take_step(samples, section, settings, **build_extra_models(name))
    assert metrics.pop("correction/masked_frac") == 0
    assert metrics == plain
    assert torch.equal(found, expected)


@pytest.mark.parametrize("num_minibatches", [1, 2])
@pytest.mark.parametrize("name", ["mix", "mix_chord"])
def test_metrics_of_a_mixture_exclude_expert_tokens(name, num_minibatches):
    """Expert tokens are in the loss but in no metric; minibatches are weighted by their sampled tokens."""
    model, reference = build_shallow(), build_shallow(seed=1)
    samples, _ = build_off_policy(model, LABELS, GROUPS, experts=(1, 4, 5), noise=1.0)
    tokens = read_tokens(model, samples, reference=reference)
    own, d = tokens.is_sampled, (tokens.logprobs - tokens.sampler).detach()
    upper = torch.maximum(-tokens.advantages * d.exp(), -tokens.advantages * d.exp().clamp(0.8, 1.2))
    section = AlgorithmSection(
        algorithm_type=name, kl_coef=0.1, kl_adaptive={"target": 1e-3, "horizon": 50},
        correction={"mask": {"level": "token", "low": 0.7, "high": 1.5}},
    )  # fmt: skip
    settings = {**STILL, "num_minibatches": num_minibatches}
    metrics, _ = take_step(samples, section, settings, reference_model=reference)
    assert 0 < own.sum() < tokens.is_real.sum() == metrics["train/num_trained_tokens"]
    assert metrics["train/kl"] == pytest.approx(estimate_kl(tokens, "k2")[own].mean().item())
    assert metrics["train/ppo_kl"] == pytest.approx(-d[own].mean().item())
    is_clipped = (upper > -tokens.advantages * d.exp() + 1e-12)[own]
    assert metrics["train/clip_frac"] == pytest.approx(is_clipped.double().mean().item())
    assert 0 < metrics["train/clip_frac"] < 1
    out = (d.exp() < 0.7) | (d.exp() > 1.5)  # in the first update the proximal policy is the policy
    assert metrics["correction/masked_frac"] == pytest.approx(out[own].double().mean().item())
    assert metrics["expert/num_sequences"] == 3


@pytest.mark.parametrize("name", ["mix", "mix_chord"])
def test_an_own_loss_reads_which_tokens_are_experts_in_minibatches_without_any(name):
    def compute_losses(scores: TokenScores) -> TokenLosses:
        ratio_N = (scores.logprobs_N - scores.old_logprobs_N).exp()
        return TokenLosses(
            losses_N=torch.where(scores.is_expert_N > 0, -scores.logprobs_N, -scores.advantages_N * ratio_N)
        )

    samples, _ = build_off_policy(build_shallow(), LABELS, GROUPS, experts=(5,))
    section = AlgorithmSection(algorithm_type=name, loss="own.py:loss")
    trainer = Trainer(
        build_shallow(),
        TrainerSection(**LOOSE, num_minibatches=3),
        section,
        max_model_len=64,
        num_total_steps=9,
        resolved=resolve_algorithm(section, functions={"algorithm.loss": compute_losses}),
    )
    metrics = trainer.step(samples)
    assert metrics["train/num_updates"] == 3
    assert metrics["expert/num_sequences"] == 1


def test_adaptive_kl_coef_excludes_expert_tokens():
    """The mean KL over sampled tokens is above the target; over all tokens it would be below."""
    model, reference = build_shallow(), build_shallow(seed=1)
    samples, _ = build_off_policy(model, LABELS, GROUPS, experts=(1, 4, 5))
    tokens = read_tokens(model, samples, reference=reference)
    kl = estimate_kl(tokens, "k2")[tokens.is_sampled].mean().item()
    target = 0.9 * kl
    assert kl * tokens.is_sampled.sum() / tokens.is_real.sum() < target
    section = AlgorithmSection(algorithm_type="mix", kl_coef=0.1, kl_adaptive={"target": target, "horizon": 50})
    model = build_shallow()
    trainer = Trainer(
        model, TrainerSection(**STILL), section, max_model_len=64, num_total_steps=9, reference_model=reference
    )
    trainer.step(samples)
    assert trainer.step(samples)["train/kl_coef"] == pytest.approx(0.1 * (1 + (kl / target - 1) * 3 / 50))


def whiten_gae(rewards, values, lengths, *, gamma: float, lam: float):
    """GAE as a double sum over steps, then whitened over all tokens."""
    advantages, start = [], 0
    for reward, length in zip(rewards, lengths, strict=True):
        v = [*values[start : start + length], 0.0]
        deltas = [(reward if t == length - 1 else 0.0) + gamma * v[t + 1] - v[t] for t in range(length)]
        advantages += [sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, length)) for t in range(length)]
        start += length
    raw = np.asarray(advantages)
    return raw + values, (raw - raw.mean()) / math.sqrt(raw.var(ddof=1) + 1e-8)


@pytest.mark.parametrize("kind", ["none", "tokens masked", "weights of tokens"])
@pytest.mark.parametrize("num_minibatches", [1, 2, 3])
def test_a_critic_with_minibatches_equals_the_formula(num_minibatches, kind):
    """Values, returns and whitening are of the step; losses are per minibatch, and metrics are means over updates."""
    model, value_model, correction = build_shallow(), build_value_model(), CORRECTIONS[kind]
    samples, _ = build_off_policy(model, LABELS, GROUPS, seed=1)
    expected: dict[str, list[float]] = {}
    with torch.no_grad():
        all_values = np.asarray([value.item() for value in compute_values_naively(value_model, samples).values()])
    all_lengths = read_tokens(model, samples).is_real.sum(1).tolist()
    all_returns, all_advantages = whiten_gae(LABELS, all_values, all_lengths, gamma=0.9, lam=0.8)
    turns = np.repeat(GROUPS, all_lengths) % num_minibatches
    for turn in range(num_minibatches):
        part = [sample for sample in samples if sample.group_index % num_minibatches == turn]
        tokens = read_tokens(model, part)
        tokens = replace(tokens, proximal=tokens.logprobs.detach())
        padded = torch.zeros_like(tokens.advantages)
        padded[tokens.is_real] = torch.from_numpy(all_advantages[turns == turn])
        tokens = replace(tokens, advantages=padded)
        old, weights, is_kept = correct(tokens, correction)
        loss = aggregate(weights * is_kept * compute_ppo_losses(tokens, old), tokens.is_real, "token-mean")
        loss.backward()
        found = {
            "train/loss": loss.item(),
            "train/grad_norm": take_gradient(model).norm().item(),
            "critic/loss": (np.square(all_values - all_returns) / 2)[turns == turn].mean(),
            "critic/value_mean": all_values.mean(),
            "critic/return_mean": all_returns.mean(),
            "critic/explained_variance": 1 - (all_returns - all_values).var() / all_returns.var(),
        }
        for name, value in found.items():
            expected.setdefault(name, []).append(value)
    section = AlgorithmSection(
        algorithm_type="ppo", terms_args={"gamma": 0.9, "lam": 0.8}, critic=CriticSection(learning_rate=1e-15),
        correction={"importance": "none", **correction},
    )  # fmt: skip
    for options in COMPUTATIONS:
        settings = {**STILL, "num_minibatches": num_minibatches, "max_tokens_per_row": options["max_tokens_per_row"]}
        settings |= {"has_prefix_sharing": options["has_prefix_sharing"], "logprob_chunk_tokens": 3}
        metrics, _ = take_step(samples, section, settings, critic_model=build_value_model())
        assert metrics["critic/clip_frac"] == 0 and metrics["train/num_updates"] == num_minibatches
        for name, values in expected.items():
            assert metrics[name] == pytest.approx(np.mean(values), rel=1e-7), name
