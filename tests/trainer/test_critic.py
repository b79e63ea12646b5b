"""The critic: values and updates, independent of packing."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from test_gradients import build_samples
from test_trainer import read_parameters, score

from trainable_models import build_shallow
from tunesmith.config import AlgorithmSection, CriticSection, TrainerSection
from tunesmith.errors import ConfigError, TrainingError
from tunesmith.model.value_model import ValueModel
from tunesmith.trainer.critic import Critic, compute_value_losses
from tunesmith.trainer.packing import pack_samples
from tunesmith.trainer.trainer import Trainer

SETTINGS = {"mismatch_warn": 1e9, "mismatch_stop": 1e9, "learning_rate": 1e-3}


def build_value_model(*, seed: int = 3, dtype: torch.dtype = torch.float64, is_zero_head: bool = False) -> ValueModel:
    model = ValueModel(build_shallow(seed=seed, dtype=dtype).get_decoder())
    if not is_zero_head:
        generator = torch.Generator().manual_seed(seed)
        model.head.weight.data.copy_(torch.randn(model.head.weight.shape, generator=generator))
        model.head.bias.data.fill_(0.25)
    return model


def build_critic(model: ValueModel, trainer: TrainerSection = TrainerSection(), **settings) -> Critic:
    return Critic(model, CriticSection(**settings), trainer)


def pack(samples, *, max_tokens: int = 10_000, has_sharing: bool = True):
    return pack_samples(samples, max_tokens_per_row=max_tokens, has_prefix_sharing=has_sharing, hidden_size=32)


def list_events(rows) -> list[tuple[int, int]]:
    return [place for row in rows for place in zip(row.sample_E.tolist(), row.time_E.tolist(), strict=True)]


def compute_values_naively(model: ValueModel, samples) -> dict[tuple[int, int], torch.Tensor]:
    """The value of each sampled token, with one plain forward per sample."""
    values = {}
    for index, sample in enumerate(samples):
        hidden = model.body(input_ids=torch.tensor([sample.token_ids]), use_cache=False).last_hidden_state[0]
        for time, is_sampled in enumerate(sample.is_sampled):
            if is_sampled:
                values[index, time] = hidden[time - 1] @ model.head.weight[0] + model.head.bias[0]
    return values


@pytest.mark.parametrize(("max_tokens", "has_sharing"), [(10_000, True), (25, True), (1, False), (60, False)])
def test_values_are_computed_at_the_previous_token(max_tokens, has_sharing):
    model, samples = build_value_model(), build_samples()
    rows = pack(samples, max_tokens=max_tokens, has_sharing=has_sharing)
    expected = compute_values_naively(model, samples)
    actual = build_critic(model).score(rows)
    np.testing.assert_allclose(actual, [expected[place].item() for place in list_events(rows)], rtol=1e-10)


def test_a_new_critic_has_value_zero():
    assert not build_critic(build_value_model(is_zero_head=True)).score(pack(build_samples())).any()


@pytest.mark.parametrize("clip_range", [None, 0.1])
def test_value_losses_equal_the_formula_by_cases(clip_range):
    for value, old, target in ((0.5, 0.45, 1.0), (0.5, 0.2, 1.0), (0.5, 0.8, 1.0), (0.5, 0.2, 0.0), (2.0, 0.0, 0.0)):
        x = torch.tensor([value], dtype=torch.float64, requires_grad=True)
        losses, is_clipped = compute_value_losses(
            x, torch.tensor([old]).double(), torch.tensor([target]).double(), clip_range=clip_range
        )
        losses.sum().backward()
        held = value if clip_range is None else min(max(value, old - 0.1), old + 0.1)
        stops = (held - target) ** 2 > (value - target) ** 2
        assert losses.item() == pytest.approx(max((value - target) ** 2, (held - target) ** 2) / 2)
        assert x.grad.item() == pytest.approx(0.0 if stops else value - target)
        assert is_clipped.item() == stops


def test_critic_update_does_not_depend_on_packing():
    samples, rng = build_samples(), np.random.default_rng(0)
    target_of = {place: rng.normal() for place in list_events(pack(samples))}
    expected = None
    for options in ({}, {"max_tokens": 25}, {"has_sharing": False}, {"max_tokens": 1, "has_sharing": False}):
        model, rows = build_value_model(), pack(samples, **options)
        returns = np.asarray([target_of[place] for place in list_events(rows)])
        critic = build_critic(model, learning_rate=1e-3, num_epochs=2, clip_range=0.01)
        metrics = critic.update(rows, critic.score(rows), returns)
        assert 0 < metrics["critic/clip_frac"] < 0.5
        expected = (read_parameters(model), metrics) if expected is None else expected
        torch.testing.assert_close(read_parameters(model), expected[0], rtol=1e-9, atol=1e-9)
        assert metrics == pytest.approx(expected[1])


def test_critic_loss_is_a_mean_over_tokens():
    model, samples = build_value_model(), build_samples()
    rows, values = pack(samples), compute_values_naively(model, samples)
    critic = build_critic(model)
    metrics = critic.update(rows, critic.score(rows), np.full(len(values), 0.5))
    assert metrics["critic/loss"] == pytest.approx(np.mean([(v.item() - 0.5) ** 2 / 2 for v in values.values()]))
    assert metrics["critic/clip_frac"] == 0


def test_critic_learns_the_returns():
    model, rows = build_value_model(is_zero_head=True), pack(build_samples())
    critic = build_critic(model, learning_rate=3e-2, num_epochs=40, clip_range=None, max_grad_norm=100)
    returns = np.linspace(-1, 1, len(list_events(rows)))
    critic.update(rows, critic.score(rows), returns)
    assert np.square(critic.score(rows) - returns).mean() < 0.2 * returns.var()


def test_non_finite_loss_leaves_the_critic_unchanged():
    model, rows = build_value_model(), pack(build_samples())
    critic, before = build_critic(model), read_parameters(model)
    with pytest.raises(TrainingError, match=r"algorithm\.critic\.learning_rate"):
        critic.update(rows, critic.score(rows), np.full(len(list_events(rows)), np.nan))
    assert torch.equal(read_parameters(model), before)


def test_gradient_checkpointing_does_not_change_the_critic_update():
    updated = []
    for has_checkpointing in (False, True):
        model, rows = build_value_model(), pack(build_samples())
        critic = build_critic(model, TrainerSection(has_gradient_checkpointing=has_checkpointing), learning_rate=1e-2)
        critic.update(rows, critic.score(rows), np.ones(len(list_events(rows))))
        updated.append(read_parameters(model))
    torch.testing.assert_close(*updated, rtol=1e-12, atol=1e-12)


def build_ppo(model, value_model, *, terms_args=None, critic=None, reference_model=None, **settings) -> Trainer:
    section = AlgorithmSection(
        algorithm_type="ppo", terms_args=terms_args or {}, critic=critic or CriticSection(learning_rate=1e-2)
    )
    return Trainer(
        model,
        TrainerSection(**{**SETTINGS, **settings}),
        section,
        max_model_len=64,
        num_total_steps=10,
        critic_model=value_model,
        reference_model=reference_model,
    )


def test_ppo_step_does_not_depend_on_packing():
    expected = None
    for settings in (
        {},
        {"max_tokens_per_row": 20, "logprob_chunk_tokens": 3},
        {"has_prefix_sharing": False},
        {"has_gradient_checkpointing": True},
    ):
        model, value_model = build_shallow(), build_value_model()
        trainer = build_ppo(model, value_model, terms_args={"gamma": 0.9, "lam": 0.8}, **settings)
        metrics = trainer.step(build_samples())
        parameters = torch.cat([read_parameters(model), read_parameters(value_model)])
        expected = (parameters, metrics) if expected is None else expected
        torch.testing.assert_close(parameters, expected[0], rtol=1e-8, atol=1e-8)
        for name in ("train/loss", "critic/loss", "critic/value_mean", "critic/return_mean"):
            assert metrics[name] == pytest.approx(expected[1][name])


def test_ppo_with_zero_values_is_reinforce_with_whitened_rewards():
    """lambda = gamma = 1 and V = 0: the advantage of every token is its rollout's reward, whitened."""
    models = build_shallow(), build_shallow()
    build_ppo(models[0], build_value_model(is_zero_head=True)).step(build_samples())
    section = AlgorithmSection(algorithm_type="reinforceplusplus")
    trainer = Trainer(models[1], TrainerSection(**SETTINGS), section, max_model_len=64, num_total_steps=10)
    trainer.step(build_samples())
    torch.testing.assert_close(*map(read_parameters, models), rtol=1e-12, atol=1e-12)


def test_policy_is_not_updated_during_critic_warmup():
    model, value_model = build_shallow(dtype=torch.float32), build_value_model(dtype=torch.float32)
    before, critic_before = read_parameters(model), read_parameters(value_model)
    trainer = build_ppo(model, value_model, critic=CriticSection(learning_rate=1e-2, warmup_steps=2))
    for _ in range(2):
        trainer.step(score(model, build_samples()))
        assert torch.equal(read_parameters(model), before)
        assert not torch.equal(read_parameters(value_model), critic_before)
    trainer.step(score(model, build_samples()))
    assert not torch.equal(read_parameters(model), before)


def test_the_kl_coefficient_is_not_adapted_during_critic_warmup():
    """The policy is its reference until its first update, so the KL says nothing about the coefficient."""
    section = AlgorithmSection(
        algorithm_type="ppo",
        kl_coef=0.1,
        kl_adaptive={"target": 0.1, "horizon": 1},
        critic=CriticSection(learning_rate=1e-2, warmup_steps=2),
    )
    trainer = Trainer(
        build_shallow(),
        TrainerSection(**SETTINGS),
        section,
        max_model_len=64,
        num_total_steps=10,
        critic_model=build_value_model(),
        reference_model=build_shallow(),
    )
    coefficients = [trainer.step(build_samples())["train/kl_coef"] for _ in range(4)]
    assert coefficients == [0.1, 0.1, 0.1, pytest.approx(0.08)]


@pytest.mark.parametrize("reference", [False, True])
def test_advantages_do_not_depend_on_the_critics_updates_within_a_step(reference):
    """Values are scored before the first update: the policy is updated as with a critic that does not move."""
    steps = []
    for learning_rate in (1e-15, 0.3):
        model, value_model = build_shallow(), build_value_model()
        trainer = build_ppo(
            model,
            value_model,
            terms_args={"gamma": 0.9, "lam": 0.8, "reward_kl_coef": 0.1 if reference else 0.0},
            critic=CriticSection(learning_rate=learning_rate, num_epochs=2),
            reference_model=build_shallow(seed=1) if reference else None,
            num_minibatches=3,
        )
        metrics = trainer.step(build_samples())
        assert metrics["train/num_updates"] == 3
        steps.append((read_parameters(model), metrics["critic/value_mean"], read_parameters(value_model)))
    assert torch.equal(steps[0][0], steps[1][0]) and steps[0][1] == steps[1][1]
    assert not torch.allclose(steps[0][2], steps[1][2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ppo_resumes_bit_for_bit(dtype):
    samples = build_samples()
    whole, critic = build_shallow(dtype=dtype), build_value_model(dtype=dtype)
    trainer = build_ppo(whole, critic)
    expected = [trainer.step(samples) for _ in range(4)]
    first, first_critic = build_shallow(dtype=dtype), build_value_model(dtype=dtype)
    trainer = build_ppo(first, first_critic)
    actual = [trainer.step(samples) for _ in range(2)]
    second, state = build_shallow(dtype=dtype, seed=5), copy.deepcopy(trainer.state_dict())
    second.load_state_dict(first.state_dict())
    second_critic = build_value_model(dtype=dtype, seed=8, is_zero_head=True)
    resumed = build_ppo(second, second_critic)
    resumed.load_state_dict(state)
    actual += [resumed.step(samples) for _ in range(2)]
    assert actual == expected
    assert torch.equal(read_parameters(second), read_parameters(whole))
    assert torch.equal(read_parameters(second_critic), read_parameters(critic))


def test_only_ppo_needs_a_critic():
    with pytest.raises(ConfigError, match="no critic model was passed"):
        build_ppo(build_shallow(), None)
    with pytest.raises(ConfigError, match="a critic model was passed"):
        Trainer(
            build_shallow(), TrainerSection(), AlgorithmSection(),
            max_model_len=64, num_total_steps=1, critic_model=build_value_model(),
        )  # fmt: skip
    with pytest.raises(ConfigError, match="no reference model"):
        build_ppo(build_shallow(), build_value_model(), terms_args={"reward_kl_coef": 0.1})


def test_kl_in_the_reward_needs_no_kl_in_the_loss():
    model = build_shallow()
    trainer = build_ppo(
        model, build_value_model(), terms_args={"reward_kl_coef": 0.1}, reference_model=build_shallow(seed=1)
    )
    metrics = trainer.step(build_samples())
    assert "train/kl" not in metrics
    assert metrics["train/loss"] == metrics["train/pg_loss"]
    plain = build_ppo(build_shallow(), build_value_model()).step(build_samples())
    assert metrics["critic/return_mean"] != plain["critic/return_mean"]


def test_values_within_the_clip_range_are_not_counted_as_clipped():
    """In float32 old + (new - old) may differ from new in the last bit, and have a larger error."""
    torch.manual_seed(0)
    old, target = torch.randn(4000), torch.randn(4000)
    new = (0.1 * torch.randn(4000)).requires_grad_()
    losses, is_clipped = compute_value_losses(new, old, target, clip_range=9.0)
    assert not is_clipped.any()
    losses.sum().backward()
    torch.testing.assert_close(new.grad, (new - target).detach())
    assert compute_value_losses(old + 0.6, old, old + 2.0, clip_range=0.5)[1].all()
    assert not compute_value_losses(old + 0.6, old, old - 2.0, clip_range=0.5)[1].any()
