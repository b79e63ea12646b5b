"""The float32 residual stream on a CUDA device: fused-layer kernels, sampled logprobs, and training on the samples."""

from __future__ import annotations

import asyncio

import pytest
import torch

from trainable_models import build_answered, build_deep
from tunesmith.config import AlgorithmSection, EngineSection, TrainerSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import Sample, Sampling

pytestmark = pytest.mark.gpu

NUM_PROMPTS, NUM_TOKENS = 24, 40


def sample_from(model, cuda_decode: str) -> list[Sample]:
    """Samples of an engine, ready for the trainer."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 97, (5 + n,), generator=generator).tolist() for n in range(NUM_PROMPTS)]
    section = EngineSection(kv_cache_tokens=16384, cuda_decode=cuda_decode)
    engine = LocalEngine(model, None, section, max_model_len=128)

    async def generate():
        samplings = [Sampling(max_tokens=NUM_TOKENS, seed=n, ignore_eos=True) for n in range(NUM_PROMPTS)]
        return await asyncio.gather(*map(engine.generate, prompts, samplings))

    return build_answered(prompts, asyncio.run(generate()))


@torch.no_grad()
def measure_error(exact, samples: list[Sample]) -> float:
    """Root mean square difference between the samples' logprobs and those of a plain float32 forward."""
    errors = []
    for sample in samples:
        ids = torch.tensor([sample.token_ids], device=exact.device)
        logprobs = exact(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].cpu()
        errors.append((logprobs - torch.tensor(sample.logprobs[1:]))[-NUM_TOKENS:])
    return torch.cat(errors).square().mean().sqrt().item()


@pytest.mark.parametrize("size", [576, 1024, 3584])
def test_rms_norm_of_float32_inputs_returns_the_weights_dtype(size):
    from tunesmith.model.kernels.layer_ops import rms_norm

    torch.manual_seed(0)
    inputs = torch.randn(3, 70, size, device="cuda") * 5
    weight = torch.randn(size, device="cuda").bfloat16()
    output, wide = rms_norm(inputs, weight, 1e-5), inputs.double()
    assert output.dtype == torch.bfloat16
    expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    torch.testing.assert_close(output.double(), expected, rtol=2**-8, atol=1e-6)  # rounded once


@pytest.mark.parametrize("num_rows", [1, 7, 200])
def test_16_bit_products_are_added_to_float32_residuals_unrounded_and_in_place(num_rows):
    from tunesmith.engine.cuda.kernels.layer_ops import add_linear

    torch.manual_seed(0)
    total = torch.randn(1, num_rows, 576, device="cuda")
    inputs, weight = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((1, num_rows, 1536), (576, 1536)))
    expected = total.double() + inputs.double() @ weight.double().T
    with torch.inference_mode():
        output = add_linear(total, inputs, weight)
    assert output.dtype == torch.float32
    assert output.data_ptr() == total.data_ptr()
    assert (total.double() - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("cuda_decode", ["eager", "graphs", "compiled"])
def test_sampled_logprobs_are_closer_to_a_float32_forward(name, cuda_decode):
    exact = build_deep(name).float().cuda()
    errors = []
    for has_fp32_residual in (False, True):
        model = build_deep(name, has_fp32_residual=has_fp32_residual).cuda()
        errors.append(measure_error(exact, sample_from(model, cuda_decode)))
    assert errors[1] < 0.9 * errors[0]
    assert errors[1] < 0.03


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_compiled_sampler_and_compiled_trainer_agree_better(name):
    found = []
    for has_fp32_residual in (False, True):
        model = build_deep(name, has_fp32_residual=has_fp32_residual).cuda()
        settings = TrainerSection(mismatch_warn=1e9, mismatch_stop=1e9)
        trainer = Trainer(model, settings, AlgorithmSection(), max_model_len=128, num_total_steps=2)
        found.append(trainer.step(sample_from(model, "compiled")))
    assert 0 < found[1]["mismatch/kl"] < 0.8 * found[0]["mismatch/kl"]
    assert found[1]["train/grad_norm"] > 0
