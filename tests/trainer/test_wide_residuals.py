"""Training with a float32 residual stream: smaller mismatch with the sampler and smaller gradient error."""

from __future__ import annotations

import asyncio
import copy
from contextlib import nullcontext

import pytest
import torch
from test_gradients import build_samples

from trainable_models import build_answered, build_deep
from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.config import AlgorithmSection, EngineSection, LoraSection, TrainerSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.model.adapters.lora import add_adapter
from tunesmith.model.forward.fp32_residual import use_fp32_residual
from tunesmith.model.value_model import ValueModel
from tunesmith.trainer.layers.gradient_checkpointing import checkpointed_layers, enable_checkpointing
from tunesmith.trainer.loss_pass import PassSetup, run_loss_pass
from tunesmith.trainer.optimizer import MasterAdamW
from tunesmith.trainer.packing import pack_samples
from tunesmith.trainer.trainer import Trainer
from tunesmith.trainer.update import prepare_update
from tunesmith.types import Sample, Sampling

LOOSE = TrainerSection(mismatch_warn=1e9, mismatch_stop=1e9, learning_rate=1e-3)
SFT = AlgorithmSection(algorithm_type="sft")


def compute_gradients(model, *, has_checkpointing: bool = False) -> dict[str, torch.Tensor]:
    """Gradients of a cross entropy in float32 by parameter name."""
    samples, algorithm = build_samples(), resolve_algorithm(SFT)
    rows = pack_samples(samples, max_tokens_per_row=100, has_prefix_sharing=True, hidden_size=64)
    MasterAdamW(model, LOOSE).clear_gradients()  # sets the gradient dtype to float32
    if has_checkpointing:
        enable_checkpointing(model)
    with checkpointed_layers(model) if has_checkpointing else nullcontext():
        setup = PassSetup(model=model, norm_length=1, chunk_tokens=64)
        preparation = prepare_update(setup, algorithm, samples, rows)
        run_loss_pass(setup, algorithm, samples, rows, preparation.inputs)
    return {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}


def measure_error(gradients: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    assert gradients.keys() == exact.keys()
    error = sum((gradients[name] - exact[name]).square().sum() for name in exact)
    return (error / sum(gradient.square().sum() for gradient in exact.values())).sqrt().item()


def sample_from(model) -> list[Sample]:
    """Answers of 20 tokens sampled by an engine, as samples of the trainer."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 97, (length,), generator=generator).tolist() for length in range(5, 25)]
    engine = LocalEngine(model, None, EngineSection(page_size=4, kv_cache_tokens=4000), max_model_len=64)

    async def generate():
        samplings = [Sampling(max_tokens=20, seed=index, ignore_eos=True) for index in range(len(prompts))]
        return await asyncio.gather(*map(engine.generate, prompts, samplings))

    return build_answered(prompts, run_lockstep(generate()))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_mismatch_of_sampler_and_trainer_is_smaller(name):
    found = []
    for has_fp32_residual in (False, True):
        model = build_deep(name, has_fp32_residual=has_fp32_residual)
        trainer = Trainer(model, LOOSE, AlgorithmSection(), max_model_len=64, num_total_steps=2)
        found.append(trainer.step(sample_from(model)))
    assert 0 < found[1]["mismatch/kl"] < 0.75 * found[0]["mismatch/kl"]
    assert found[1]["mismatch/max_log_ratio"] < found[0]["mismatch/max_log_ratio"]


def test_gradient_is_closer_to_that_in_float32():
    errors = {False: 0.0, True: 0.0}
    for seed in range(3):
        exact = compute_gradients(build_deep(seed=seed).float())
        for flag in errors:
            gradients = compute_gradients(build_deep(has_fp32_residual=flag, seed=seed))
            errors[flag] += measure_error(gradients, exact) / 3
    assert errors[True] < 0.9 * errors[False]
    assert errors[True] < 0.02


def test_checkpointing_does_not_change_the_gradient():
    expected = compute_gradients(build_deep(has_fp32_residual=True))
    checkpointed = compute_gradients(build_deep(has_fp32_residual=True), has_checkpointing=True)
    assert all(torch.equal(checkpointed[name], gradient) for name, gradient in expected.items())


def test_adapter_gradient_is_close_to_that_in_float32():
    found = []
    for dtype, has_fp32_residual in ((torch.float32, False), (torch.bfloat16, True)):
        model = build_deep().to(dtype).requires_grad_(True)
        add_adapter(model, LoraSection(r=4, target_modules="all-linear"), base="base", dtype=dtype)
        if has_fp32_residual:
            use_fp32_residual(model)
        found.append(compute_gradients(model))
    exact, ours = found
    assert measure_error(ours, exact) < 0.02


def test_critic_casts_the_final_norm_to_its_head_dtype():
    policy, samples = build_deep(has_fp32_residual=True), build_samples()
    critic = ValueModel(copy.deepcopy(policy).get_decoder())
    trainer = Trainer(
        policy, LOOSE, AlgorithmSection(algorithm_type="ppo"), max_model_len=64, num_total_steps=2, critic_model=critic
    )
    before = [weight.detach().clone() for weight in critic.parameters()]
    for _ in range(2):  # the head of zeros gives the body no gradient in the first
        metrics = trainer.step(samples)
    assert metrics["critic/grad_norm"] > 0
    assert all(not torch.equal(old, new) for old, new in zip(before[-2:], [*critic.parameters()][-2:], strict=True))
    assert any(not torch.equal(old, new) for old, new in zip(before[:-2], [*critic.parameters()][:-2], strict=True))
