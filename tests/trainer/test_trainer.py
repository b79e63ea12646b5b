"""Training steps: updates, metrics and errors."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import replace

import pytest
import torch
from test_gradients import build_samples
from transformers import AutoModelForCausalLM

from sample_spans import list_distributions
from tiny_models import CONFIGS
from trainable_models import build_trainable
from tunesmith.config import AlgorithmSection, TrainerSection
from tunesmith.errors import ConfigError, ModelError, TrainingError
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import Sample

GRPO = AlgorithmSection(algorithm_type="grpo")
LOOSE = {"mismatch_warn": 1e9, "mismatch_stop": 1e9, "learning_rate": 1e-3}


def build_trainer(
    model=None, algorithm: AlgorithmSection = GRPO, reference_model=None, has_separate_sampler=False, **settings
) -> Trainer:
    return Trainer(
        model or build_trainable(dtype=torch.float32),
        TrainerSection(**{**LOOSE, **settings}),
        algorithm,
        max_model_len=64,
        num_total_steps=10,
        reference_model=reference_model,
        has_separate_sampler=has_separate_sampler,
    )


def score(model, samples: list[Sample], *, shift: float = 0.0) -> list[Sample]:
    """The samples with the model's own logprobs, shifted by `shift`."""
    scored = []
    for sample in samples:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([sample.token_ids])).logits[0]
        logprobs = [0.0] * len(sample.token_ids)
        for time, distribution in enumerate(list_distributions(sample)):
            if distribution is not None:
                row = logits[time - 1] / distribution.temperature
                if distribution.top_k:
                    is_dropped = row < row.topk(distribution.top_k).values[-1]
                    is_dropped[sample.token_ids[time]] = False
                    row = row.masked_fill(is_dropped, -math.inf)
                logprobs[time] = row.log_softmax(-1)[sample.token_ids[time]].item() + shift
        scored.append(replace(sample, logprobs=tuple(logprobs)))
    return scored


def read_parameters(model) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def test_step_reports_metrics():
    model, samples = build_trainable(dtype=torch.float32), build_samples()
    samples = score(model, samples)
    metrics = build_trainer(model).step(samples)
    num_trained = sum(sum(sample.is_sampled) for sample in samples)
    assert metrics["train/num_trained_tokens"] == num_trained
    assert metrics["train/num_tokens"] < metrics["train/num_flat_tokens"]
    assert metrics["train/learning_rate"] == 1e-3
    assert metrics["train/num_updates"] == 1
    assert metrics["train/clip_frac"] == 0
    assert metrics["train/grad_norm"] > 0
    assert 0 < metrics["train/entropy"] < math.log(97)
    mean_advantage = sum(map(sum, (sample.advantages for sample in samples))) / num_trained
    assert metrics["train/loss"] == metrics["train/pg_loss"] == pytest.approx(-mean_advantage, rel=1e-4)
    assert 0 <= metrics["mismatch/kl"] < 1e-9
    assert metrics["mismatch/max_log_ratio"] < 1e-4


def test_mismatch_is_measured_in_nats():
    model = build_trainable(dtype=torch.float32)
    metrics = build_trainer(model).step(score(model, build_samples(), shift=0.5))
    assert metrics["mismatch/max_log_ratio"] == pytest.approx(0.5, abs=1e-4)
    assert metrics["mismatch/kl"] == pytest.approx(math.exp(-0.5) - 1 + 0.5, rel=1e-3)


def test_mismatch_warns_then_stops_without_an_update(caplog):
    model = build_trainable(dtype=torch.float32)
    samples, before = score(model, build_samples(), shift=0.5), read_parameters(model)
    with caplog.at_level(logging.WARNING):
        build_trainer(model, mismatch_warn=0.1, mismatch_stop=0.2, learning_rate=1e-9).step(samples)
    assert "above trainer.mismatch_warn=0.1" in caplog.text
    model.load_state_dict(build_trainable(dtype=torch.float32).state_dict())
    with pytest.raises(TrainingError, match=r"mismatch_stop=0\.05.*likely causes"):
        build_trainer(model, mismatch_stop=0.05).step(samples)
    assert torch.equal(read_parameters(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_parameters_change_in_place():
    model = build_trainable(dtype=torch.bfloat16)
    pointers, before = [parameter.data_ptr() for parameter in model.parameters()], read_parameters(model)
    build_trainer(model, learning_rate=0.1).step(build_samples())
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    assert not torch.equal(read_parameters(model), before)
    assert not any(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_loss_raises_without_an_update(value):
    model = build_trainable(dtype=torch.float32)
    trainer, before, samples = build_trainer(model), read_parameters(model), build_samples()
    advantages = tuple(value if is_sampled else 0.0 for is_sampled in samples[0].is_sampled)
    with pytest.raises(TrainingError, match="no update was made"):
        trainer.step([replace(samples[0], advantages=advantages), *samples[1:]])
    assert torch.equal(read_parameters(model), before)
    trainer.step(samples)
    assert not torch.equal(read_parameters(model), before)


def test_out_of_memory_names_the_knobs_without_an_update():
    model = build_trainable(dtype=torch.float32)
    trainer, before, samples = build_trainer(model), read_parameters(model), build_samples()

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    hook = model.get_decoder().register_forward_hook(fail)
    with pytest.raises(TrainingError, match=r"trainer\.max_tokens_per_row"):
        trainer.step(samples)
    hook.remove()
    assert torch.equal(read_parameters(model), before)
    trainer.step(samples)
    assert not torch.equal(read_parameters(model), before)


def test_step_without_samples_counts_without_an_update():
    model = build_trainable(dtype=torch.float32)
    trainer, before = build_trainer(model, warmup_steps=3), read_parameters(model)
    metrics = trainer.step([])
    assert (metrics["train/num_trained_tokens"], metrics["train/num_updates"]) == (0, 0)
    assert torch.equal(read_parameters(model), before)
    assert trainer.num_steps == 1
    assert trainer.step([])["train/learning_rate"] == pytest.approx(2 * metrics["train/learning_rate"])


def test_update_does_not_depend_on_packing():
    """The weights after an update are the same for all rows, chunks, prefix sharing and checkpointing."""
    expected = None
    for settings in (
        {},
        {"max_tokens_per_row": 20, "logprob_chunk_tokens": 3},
        {"has_prefix_sharing": False},
        {"has_gradient_checkpointing": True},
    ):
        model = build_trainable(dtype=torch.float64)
        build_trainer(model, **settings).step(build_samples())
        expected = read_parameters(model) if expected is None else expected
        torch.testing.assert_close(read_parameters(model), expected, rtol=1e-9, atol=1e-9)


def test_minibatches_have_whole_groups_and_separate_updates():
    samples = build_samples()
    model, by_hand = build_trainable(), build_trainable()
    metrics = build_trainer(model, num_minibatches=2).step(samples)
    trainer = build_trainer(by_hand)
    trainer.step([sample for sample in samples if sample.group_index in (0, 2)])
    trainer.step([sample for sample in samples if sample.group_index == 1])
    assert metrics["train/num_updates"] == 2
    torch.testing.assert_close(read_parameters(model), read_parameters(by_hand), rtol=1e-12, atol=1e-12)
    assert build_trainer(num_minibatches=8).step(samples)["train/num_updates"] == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_resumes_bit_for_bit(dtype):
    samples, settings = build_samples(), {"warmup_steps": 3, "learning_rate": 0.01}
    whole, first = build_trainable(dtype=dtype), build_trainable(dtype=dtype)
    trainer = build_trainer(whole, **settings)
    expected = [trainer.step(samples) for _ in range(4)]
    trainer = build_trainer(first, **settings)
    actual = [trainer.step(samples) for _ in range(2)]
    second, state = build_trainable(dtype=dtype, seed=5), copy.deepcopy(trainer.state_dict())
    second.load_state_dict(first.state_dict())
    resumed = build_trainer(second, **settings)
    resumed.load_state_dict(state)
    actual += [resumed.step(samples) for _ in range(2)]
    assert actual == expected
    assert torch.equal(read_parameters(second), read_parameters(whole))


def test_steps_raise_the_probability_of_rewarded_tokens():
    model = build_trainable(dtype=torch.float32)
    samples, trainer = score(model, build_samples()), build_trainer(model, learning_rate=3e-3)
    for _ in range(8):
        trainer.step(score(model, samples))
    rescored = score(model, samples)
    gain = sum(
        advantage * (new - old)
        for before, after in zip(samples, rescored, strict=True)
        for advantage, old, new in zip(before.advantages, before.logprobs, after.logprobs, strict=True)
    )
    assert gain > 0


def test_supervised_training_needs_no_sampler_logprobs():
    model = build_trainable(dtype=torch.float32)
    samples = [replace(sample, logprobs=(0.0,) * len(sample.logprobs)) for sample in build_samples()]
    samples = [replace(sample, distribution_spans=()) for sample in samples]
    trainer = build_trainer(model, AlgorithmSection(algorithm_type="sft"), learning_rate=1e-2, mismatch_stop=1e-12)
    before = trainer.compute_loss(samples)
    metrics = trainer.step(samples)
    assert metrics["train/loss"] == pytest.approx(before, rel=1e-6)
    assert not any(name.startswith("mismatch") or name == "train/pg_loss" for name in metrics)
    for _ in range(5):
        trainer.step(samples)
    assert trainer.compute_loss(samples) < before


def test_compute_loss_does_not_update():
    model = build_trainable(dtype=torch.float32)
    trainer, before = build_trainer(model), read_parameters(model)
    assert trainer.compute_loss(build_samples()) == pytest.approx(trainer.step(build_samples())["train/loss"])
    model.load_state_dict(build_trainable(dtype=torch.float32).state_dict())
    trainer.compute_loss(build_samples())
    assert torch.equal(read_parameters(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(ValueError, match="no loss to compute"):
        trainer.compute_loss([])


@pytest.mark.parametrize("name", ["sft_is", "sft_phi"])
def test_supervised_algorithms_are_evaluated_by_cross_entropy(name):
    # -p log p is smaller for a model to which the tokens are less probable, so it cannot rank models
    losses = []
    for seed in (0, 1):
        sft, weighted = (
            build_trainer(build_trainable(seed=seed, dtype=torch.float32), AlgorithmSection(algorithm_type=each))
            for each in ("sft", name)
        )
        losses.append(weighted.compute_loss(build_samples()))
        assert losses[-1] == sft.compute_loss(build_samples())
        assert weighted.step(build_samples())["train/loss"] < losses[-1] / 2  # trained by its own loss
    assert losses[0] != losses[1]


def test_kl_needs_a_reference_model_and_reports():
    section = AlgorithmSection(kl_coef=0.1)
    with pytest.raises(ConfigError, match="no reference model"):
        build_trainer(algorithm=section)
    with pytest.raises(ConfigError, match="a reference model was passed"):
        build_trainer(reference_model=build_trainable())
    with pytest.raises(ConfigError, match="needs sampled tokens"):
        build_trainer(algorithm=AlgorithmSection(algorithm_type="sft", kl_coef=0.1))
    model, reference = build_trainable(), build_trainable()
    metrics = build_trainer(model, section, reference_model=reference).step(build_samples())
    assert metrics["train/kl"] == 0
    model = build_trainable(seed=1)
    metrics = build_trainer(model, section, reference_model=reference).step(build_samples())
    assert metrics["train/kl"] > 0
    assert metrics["train/loss"] == pytest.approx(metrics["train/pg_loss"] + 0.1 * metrics["train/kl"])


def test_entropy_bonus_enters_the_loss():
    metrics = build_trainer(algorithm=AlgorithmSection(entropy_coef=0.5)).step(build_samples())
    assert metrics["train/loss"] == pytest.approx(metrics["train/pg_loss"] - 0.5 * metrics["train/entropy"])


def test_model_without_plan_attention_is_refused():
    with pytest.raises(ModelError, match="use_plan_attention"):
        build_trainer(AutoModelForCausalLM.from_config(CONFIGS["llama"]))


def test_dropout_under_gradient_checkpointing_is_refused():
    model = build_trainable()
    model.config.attention_dropout = 0.1
    with pytest.raises(ConfigError, match=r"attention_dropout=0\.1"):
        build_trainer(model, has_gradient_checkpointing=True)


def test_norm_length_scales_dr_grpo():
    """The loss is divided by `norm_length`, by default the model's context."""
    samples, losses = build_samples(), {}
    for norm_length in (None, 64, 16):
        section = AlgorithmSection(algorithm_type="dr_grpo", norm_length=norm_length)
        losses[norm_length] = build_trainer(build_trainable(), section).step(samples)["train/loss"]
    assert losses[None] == losses[64]
    assert losses[16] == pytest.approx(4 * losses[64])


def test_metrics_of_minibatches_are_merged_by_their_reduction():
    """Means over tokens are weighted by tokens, counts are summed, and the mismatch is that of the first update."""
    model = build_trainable(dtype=torch.float32)
    samples = score(model, build_samples())
    shifted = [
        replace(s, logprobs=tuple(lp - 0.5 if m else 0.0 for lp, m in zip(s.logprobs, s.is_sampled, strict=True)))
        if s.group_index == 1
        else s
        for s in samples
    ]
    metrics = build_trainer(model, num_minibatches=3, learning_rate=1e-12).step(shifted)
    num_trained = [sum(sum(s.is_sampled) for s in shifted if s.group_index == group) for group in range(3)]
    assert len(set(num_trained)) > 1
    assert metrics["train/num_updates"] == 3 and metrics["train/num_trained_tokens"] == sum(num_trained)
    assert metrics["train/ppo_kl"] == pytest.approx(-0.5 * num_trained[1] / sum(num_trained), rel=1e-3)
    assert metrics["mismatch/max_log_ratio"] < 1e-4 and metrics["mismatch/kl"] < 1e-9


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_router_and_experts_are_trained_and_their_load_is_reported(name):
    model = build_trainable(name, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    metrics = build_trainer(model, learning_rate=1e-3).step(score(model, build_samples()))
    assert metrics["mismatch/kl"] < 1e-9
    assert 1 < metrics["routing/max_load"] <= 4  # 8 experts, of which each token has 2
    assert 0 <= metrics["routing/unused"] < 1
    trained = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    changed = {name.rpartition("mlp.")[2] for name in trained}
    assert {"gate.weight", "experts.gate_up_proj", "experts.down_proj"} <= changed
    assert not any("correction_bias" in name for name in changed)
