"""Adapter training: gradients equal to PEFT's, a frozen base as the reference, and exact resumption."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_gradients import build_samples
from test_trainer import score
from transformers import AutoModelForCausalLM

from sample_spans import build_spans
from tiny_models import CONFIGS
from trainable_models import build_trainable
from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.config import AlgorithmSection, LoraSection, TrainerSection
from tunesmith.errors import ConfigError
from tunesmith.model.adapters.lora import add_adapter
from tunesmith.model.load import load_model
from tunesmith.trainer.loss_pass import PassSetup, run_loss_pass
from tunesmith.trainer.packing import pack_samples
from tunesmith.trainer.reference import Reference
from tunesmith.trainer.scoring_pass import ScoringModels, score_tokens
from tunesmith.trainer.trainer import Trainer
from tunesmith.trainer.update import prepare_update
from tunesmith.types import Distribution, Sample

LORA = LoraSection(r=3, alpha=6.0, target_modules=("q_proj", "v_proj", "down_proj"))
SFT = AlgorithmSection(algorithm_type="sft")
KL = AlgorithmSection(algorithm_type="grpo", kl_coef=0.3, kl_estimator="k3")


def build_adapted(*, seed=0, dtype=torch.float32, dropout=0.0):
    """A tiny model with an adapter whose two factors are non-zero."""
    model = build_trainable(dtype=dtype, seed=seed)
    add_adapter(model, LORA.model_copy(update={"dropout": dropout}), base="base", dtype=dtype)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def build_demonstrations(num_rows=5):
    generator = torch.Generator().manual_seed(3)
    samples = []
    for row in range(num_rows):
        length = 8 + 3 * row
        ids = torch.randint(0, 97, (length,), generator=generator).tolist()
        mask = [time >= 4 and time % 5 != 0 for time in range(length)]
        samples.append(
            Sample(
                token_ids=tuple(ids),
                is_sampled=tuple(mask),
                logprobs=(0.0,) * length,
                advantages=tuple(1.0 if trained else 0.0 for trained in mask),
                policy_versions=tuple(0 if trained else None for trained in mask),
                distribution_spans=build_spans([Distribution() if trained else None for trained in mask]),
                group_index=row,
                trajectory_index=row,
            )
        )
    return samples


def build_trainer(model, algorithm=SFT, *, dropout_seed=0, **settings):
    return Trainer(
        model,
        TrainerSection(**({"learning_rate": 1e-2, "mismatch_stop": 1e9, "mismatch_warn": 1e9} | settings)),
        algorithm,
        max_model_len=64,
        num_total_steps=10,
        reference_model=model if algorithm.kl_coef else None,
        dropout_seed=dropout_seed,
    )


def get_adapter(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_loss_and_gradient_equal_peft_and_transformers():
    """Against a padded batch with the loss of transformers on the PEFT model."""
    samples, ours = build_demonstrations(), build_adapted()
    plain = AutoModelForCausalLM.from_config(CONFIGS["llama"], dtype=torch.float32)
    theirs = get_peft_model(
        plain, LoraConfig(r=3, lora_alpha=6, target_modules=list(LORA.target_modules), task_type="CAUSAL_LM")
    ).eval()
    theirs.get_base_model().load_state_dict(ours.state_dict())
    longest = max(len(sample.token_ids) for sample in samples)
    ids, labels, attention = (torch.full((len(samples), longest), fill) for fill in (0, -100, 0))
    for row, sample in enumerate(samples):
        ids[row, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
        attention[row, : len(sample.token_ids)] = 1
        for time, is_sampled in enumerate(sample.is_sampled):
            if is_sampled:
                labels[row, time] = sample.token_ids[time]
    loss = theirs(input_ids=ids, attention_mask=attention, labels=labels).loss
    loss.backward()
    expected = get_adapter(theirs.get_base_model())

    rows = pack_samples(samples, max_tokens_per_row=40, has_prefix_sharing=True, hidden_size=32)
    setup = PassSetup(model=ours, norm_length=64, chunk_tokens=16)
    preparation = prepare_update(setup, resolve_algorithm(SFT), samples, rows)
    totals = run_loss_pass(setup, resolve_algorithm(SFT), samples, rows, preparation.inputs)
    assert totals["train/loss"][1].item() == pytest.approx(loss.item(), rel=1e-6)
    gradients = {name: parameter.grad for name, parameter in get_adapter(ours).items()}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name].grad, atol=1e-6, rtol=1e-4)


def step_with_dropout(*, seed=5, num_steps_before=0, **settings):
    """A trainer after one step with dropout, the gradient norm and the loss."""
    model = build_adapted(dropout=0.4)
    trainer = build_trainer(model, dropout_seed=seed, **settings)
    trainer.num_steps = num_steps_before
    metrics = trainer.step(build_demonstrations())
    return model, metrics["train/loss"], metrics["train/grad_norm"]


def test_dropout_equals_peft_in_training_mode():
    sample, ours = build_demonstrations()[-1], build_adapted(dropout=0.4)
    plain = AutoModelForCausalLM.from_config(CONFIGS["llama"], dtype=torch.float32)
    config = LoraConfig(
        r=3, lora_alpha=6, target_modules=list(LORA.target_modules), task_type="CAUSAL_LM", lora_dropout=0.4
    )
    theirs = get_peft_model(plain, config)
    theirs.get_base_model().load_state_dict(ours.state_dict())
    is_trained = torch.tensor(sample.is_sampled[1:])
    ids = torch.tensor([sample.token_ids])
    torch.manual_seed(int(np.random.SeedSequence((5, 0)).generate_state(1)[0]))
    logits = theirs.train()(input_ids=ids[:, :-1]).logits[0, is_trained]
    expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:][is_trained]).item()
    metrics = build_trainer(ours, dropout_seed=5).step([sample])
    assert metrics["train/loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["train/loss"] != pytest.approx(build_trainer(build_adapted()).step([sample])["train/loss"], rel=1e-4)


def test_dropout_depends_on_seed_and_step_only():
    state = torch.get_rng_state()
    one = step_with_dropout()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    again, checkpointed = step_with_dropout(), step_with_dropout(has_gradient_checkpointing=True)
    assert one[1:] == again[1:]
    assert all(torch.equal(p, q) for p, q in zip(one[0].parameters(), again[0].parameters(), strict=True))
    assert checkpointed[1:] == pytest.approx(one[1:], rel=1e-5)
    assert step_with_dropout(seed=6)[1] != one[1]
    assert step_with_dropout(num_steps_before=1)[1] != one[1]


def test_minibatches_of_a_step_drop_different_values():
    """Two equal minibatches with the same weights; the first one drops what a single one drops."""
    one = build_demonstrations()[-1]
    twice = [one, replace(one, group_index=9, trajectory_index=9)]
    losses = [
        build_trainer(build_adapted(dropout=0.4), num_minibatches=2, learning_rate=1e-30).step(samples)["train/loss"]
        for samples in ([one], twice)
    ]
    assert losses[1] != pytest.approx(losses[0], rel=1e-3)
    again = build_trainer(build_adapted(dropout=0.4), num_minibatches=2, learning_rate=1e-30)
    assert again.step(twice)["train/loss"] == losses[1]


def test_dropout_is_off_outside_the_loss_pass():
    model, plain = build_adapted(dropout=0.4), build_adapted()
    trainer = build_trainer(model)
    samples = build_demonstrations()
    assert trainer.compute_loss(samples) == build_trainer(plain).compute_loss(samples)
    trainer.step(samples)
    assert not any(module.training for module in model.modules())
    assert trainer.compute_loss(samples) == trainer.compute_loss(samples)


def test_dropout_is_refused_in_reinforcement_learning():
    for algorithm in (AlgorithmSection(), AlgorithmSection(algorithm_type="dpo")):
        with pytest.raises(ConfigError, match=r"model.lora.dropout=0.4 is for supervised fine-tuning only"):
            build_trainer(build_adapted(dropout=0.4), algorithm)


def test_only_the_adapter_is_updated():
    model = build_adapted()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    trainer = build_trainer(model)
    trainer.step(build_demonstrations())
    adapter = get_adapter(model)
    state = trainer.state_dict()["optimizer"]
    assert {key.split(":")[1] for key in state} == adapter.keys()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == adapter.keys()


def test_an_adapter_of_the_head_alone_is_trained():
    model = build_trainable(dtype=torch.float32, is_tied=False)
    add_adapter(model, LoraSection(target_modules=("lm_head",)), base="base", dtype=torch.float32)
    trainer, samples = build_trainer(model), build_demonstrations()
    losses = [trainer.step(samples)["train/loss"] for _ in range(5)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]


def test_bfloat16_adapters_have_float32_masters():
    model = build_trainable(dtype=torch.bfloat16)
    add_adapter(model, LORA, base="base", dtype=torch.bfloat16)
    trainer = build_trainer(model, learning_rate=1e-4)
    trainer.step(build_demonstrations())
    state = trainer.state_dict()["optimizer"]
    masters = {key.split(":")[1]: value for key, value in state.items() if key.startswith("master:")}
    assert masters.keys() == get_adapter(model).keys()
    for name, master in masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(master.bfloat16(), get_adapter(model)[name])


def test_reference_of_an_adapter_equals_its_base_bit_for_bit():
    samples, model = build_samples(), build_adapted()
    algorithm = resolve_algorithm(KL)
    rows = pack_samples(samples, max_tokens_per_row=60, has_prefix_sharing=True, hidden_size=32)
    preparation = prepare_update(
        PassSetup(
            model=model, norm_length=64, chunk_tokens=16, scoring_models=ScoringModels(reference=Reference(model))
        ),
        algorithm,
        samples,
        rows,
    )
    base = score_tokens(build_trainable(dtype=torch.float32), samples, rows, chunk_tokens=16)[0]
    assert (preparation.inputs.reference_logprobs_E == base).all()
    assert abs(score_tokens(model, samples, rows, chunk_tokens=16)[0] - base).max() > 1e-2


def test_kl_of_an_adapter_needs_no_second_model():
    samples = score(build_adapted(), build_samples())
    adapted, with_copy = build_adapted(), build_adapted()
    metrics = build_trainer(adapted, KL).step(samples)
    frozen = build_trainable(dtype=torch.float32).requires_grad_(False)
    trainer = Trainer(
        with_copy,
        TrainerSection(learning_rate=1e-2),
        KL,
        max_model_len=64,
        num_total_steps=10,
        reference_model=frozen,
    )
    assert metrics == trainer.step(samples)
    assert metrics["train/kl"] > 0
    for one, other in zip(adapted.parameters(), with_copy.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_new_adapter_has_no_kl():
    model = build_trainable(dtype=torch.float32)
    add_adapter(model, LORA, base="base", dtype=torch.float32)
    metrics = build_trainer(model.eval(), KL).step(score(model, build_samples()))
    assert abs(metrics["train/kl"]) < 1e-6


def test_gradient_checkpointing_does_not_change_the_update():
    samples = build_demonstrations()
    one, other = build_adapted(), build_adapted()
    build_trainer(one).step(samples)
    build_trainer(other, has_gradient_checkpointing=True).step(samples)
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=1e-5)


def test_adapter_training_resumes_bit_for_bit():
    samples = build_demonstrations()
    through, stopped = build_adapted(), build_adapted()
    trainer = build_trainer(through)
    first = build_trainer(stopped)
    for _ in range(2):
        trainer.step(samples)
        first.step(samples)
    resumed = build_adapted()
    resumed.load_state_dict(stopped.state_dict())
    second = build_trainer(resumed)
    second.load_state_dict(first.state_dict())
    assert trainer.step(samples) == second.step(samples)
    for one, other in zip(through.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_4bit_weights_give_the_gradient_of_the_dequantized_weights(pocket_folder):
    """After a forward without gradients, as in sampling; the reference has the weights rounded to NF4."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    lora = LoraSection(r=3, quantization="nf4")
    ours = load_model(pocket_folder, dtype=torch.float32, device=torch.device("cpu"), lora=lora)
    reference = AutoModelForCausalLM.from_pretrained(pocket_folder)
    with torch.no_grad():
        for name, layer in ours.named_modules():
            if isinstance(layer, bitsandbytes.nn.Linear4bit):
                whole = reference.get_submodule(name.removesuffix(".base_layer"))
                whole.weight.copy_(bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state))
    add_adapter(reference, LoraSection(r=3), base="base", dtype=torch.float32)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for one, other in zip(get_adapter(ours).values(), get_adapter(reference).values(), strict=True):
            one.copy_(torch.randn(one.shape, generator=generator) * 0.1)
            other.copy_(one)
    ids = torch.arange(9, 40)[None]
    with torch.inference_mode():
        before = ours(ids).logits.clone()
    losses = [model(input_ids=ids, labels=ids).loss for model in (ours, reference)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for loss in losses:
        loss.backward()
    for name, one in get_adapter(ours).items():
        torch.testing.assert_close(one.grad, get_adapter(reference)[name].grad, atol=1e-6, rtol=1e-4)
    with torch.inference_mode():
        torch.testing.assert_close(ours(ids).logits, before, atol=0, rtol=0)
        torch.testing.assert_close(before, reference(ids).logits, atol=1e-4, rtol=1e-4)
