"""Sampling from FP8 weights: kernels against the written formulas, and an engine that follows the trained weights."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tiny_models import build_tiny
from tunesmith.config import EngineSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.errors import ConfigError
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.types import Completion, Sampling

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
PROMPTS = [[5, 17, 80, 3], [9] * 11, [44, 2, 61, 12, 13, 90, 7], [1]]


@pytest.fixture(autouse=True)
def _needs_fp8() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9")


def round_rows(x: Tensor) -> Tensor:
    """Each row as e4m3 numbers times its scale, by the formula."""
    scale = x.float().abs().amax(-1, keepdim=True) / 448
    scale = torch.where(scale > 0, scale, 1.0)
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


def build_model(name: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    model = copy.deepcopy(build_tiny(name)).to(device=CUDA, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.4)
    use_plan_attention(model)
    return model


def build_engine(model: PreTrainedModel, **settings: str) -> LocalEngine:
    section = EngineSection(kv_cache_tokens=4096, **settings)
    return LocalEngine(model, None, section, max_model_len=200)


def generate(engine: LocalEngine, prompts: list[list[int]] = PROMPTS) -> list[Completion]:
    async def run() -> list[Completion]:
        sampling = Sampling(max_tokens=24, ignore_eos=True)
        return await asyncio.gather(*[engine.generate(prompt, sampling) for prompt in prompts])

    return asyncio.run(run())


@torch.no_grad()
def compute_logprobs(model: PreTrainedModel, completions: list[Completion]) -> Tensor:
    found = []
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.sampled_ids]], device=CUDA)
        position_ids = torch.arange(ids.shape[1], device=CUDA)[None]
        plain = copy.deepcopy(model)
        plain.set_attn_implementation("eager")
        logprobs = (
            plain(input_ids=ids, position_ids=position_ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        )
        found.append(logprobs.gather(1, torch.tensor(completion.sampled_ids, device=CUDA)[:, None])[:, 0])
    return torch.cat(found).cpu()


def get_logprobs(completions: list[Completion]) -> Tensor:
    return torch.tensor([logprob for completion in completions for logprob in completion.logprobs])


def round_weights(model: PreTrainedModel) -> PreTrainedModel:
    """The model with the decoder's linear weights rounded to FP8 and back, in float32."""
    rounded = copy.deepcopy(model).float()
    with torch.no_grad():
        for layer in rounded.get_decoder().modules():
            if type(layer) is torch.nn.Linear:
                layer.weight.copy_(round_rows(layer.weight))
    return rounded


@pytest.mark.parametrize("size", [32, 3584, 5000, 18944])
def test_rows_are_quantized_by_their_largest_element(size: int) -> None:
    """Every element becomes a nearest e4m3 number: off by at most half a step, 1/16 of it, or half of 2^-9."""
    from tunesmith.engine.cuda.kernels.fp8_kernels import quantize_rows

    factors = torch.logspace(-6, 4, 37, device=CUDA)[:, None].bfloat16()
    x = torch.randn(37, size, device=CUDA, dtype=torch.bfloat16) * factors
    x[5] = 0
    rows = quantize_rows(x)
    torch.testing.assert_close(rows.scales_R[6:], x[6:].float().abs().amax(1) / 448)
    assert (rows.values_RK.float().abs().amax(1) == torch.tensor([448.0] * 5 + [0.0] + [448.0] * 31, device=CUDA)).all()
    error = (rows.dequantize() - x.float()).abs()
    assert (error <= (x.float().abs() / 16 + rows.scales_R[:, None] / 1024) * (1 + 1e-4)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_is_quantized_as_its_rounded_output(dtype: torch.dtype) -> None:
    from tunesmith.engine.cuda.kernels.fp8_kernels import rms_norm_quantize

    x, weight = torch.randn(19, 576, device=CUDA, dtype=dtype) * 3, torch.randn(576, device=CUDA, dtype=torch.bfloat16)
    normed = (x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(dtype)
    expected = round_rows((normed * weight).to(torch.bfloat16))
    found = rms_norm_quantize(x, weight, 1e-5).dequantize()
    assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("size", [48, 8960, 18944, 33000])
def test_scales_are_applied_after_a_product(size: int) -> None:
    from tunesmith.engine.cuda.kernels import fp8_kernels

    products = torch.randn(23, 2 * size, device=CUDA, dtype=torch.bfloat16) * 100
    row_scales, column_scales = torch.rand(23, device=CUDA) + 0.1, torch.rand(2 * size, device=CUDA) * 0.02
    bias, total = (torch.randn(shape, device=CUDA, dtype=torch.bfloat16) for shape in ((2 * size,), (23, 2 * size)))
    exact = products.double() * row_scales.double()[:, None] * column_scales.double()
    scaled = fp8_kernels.scale_products(products, row_scales, column_scales, bias, dtype=torch.bfloat16)
    torch.testing.assert_close(scaled.double(), exact + bias.double(), rtol=1e-2, atol=1e-2)
    kept = total.clone()
    fp8_kernels.add_scaled_products(total, products, row_scales, column_scales)
    torch.testing.assert_close(total.double(), exact + kept.double(), rtol=1e-2, atol=1e-2)
    gate, value = exact.bfloat16().chunk(2, dim=1)
    activated = (torch.nn.functional.silu(gate.float()).bfloat16() * value).float()
    rows = fp8_kernels.silu_and_mul_quantize(products, row_scales, column_scales)
    error = (rows.dequantize() - activated).abs()
    half_step = activated.abs() / 16 + rows.scales_R[:, None] / 1024
    # A scaled product near the middle of two bfloat16 numbers rounds to either; SiLU enlarges the difference.
    assert (error <= 1.001 * half_step).float().mean() > 0.98
    assert (error <= 1.001 * half_step + activated.abs() / 8).all()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_the_engine_samples_from_the_rounded_weights(name: str) -> None:
    """Its logprobs are nearer to those of the rounded weights than of the model's own; only inputs differ."""
    model = build_model(name)
    completions = generate(build_engine(model, weight_format="fp8"))
    found = get_logprobs(completions)
    to_rounded = (found - compute_logprobs(round_weights(model), completions)).abs().mean()
    to_own = (found - compute_logprobs(model, completions)).abs().mean()
    plain = generate(build_engine(build_model(name)))
    baseline = (get_logprobs(plain) - compute_logprobs(model, plain)).abs().mean()
    assert to_rounded < to_own < 0.3
    assert to_own > baseline


def test_every_linear_weight_of_the_layers_is_read_in_fp8() -> None:
    """With the model's own weights destroyed behind the copy, samples and logprobs stay the same."""
    model = build_model("qwen2")
    engine = build_engine(model, weight_format="fp8")
    before = generate(engine)
    with torch.no_grad():
        for layer in model.get_decoder().modules():
            if type(layer) is torch.nn.Linear:
                layer.weight.fill_(float("nan"))
    after = generate(engine, [[*prompt] for prompt in PROMPTS])
    assert [one.sampled_ids for one in before] == [one.sampled_ids for one in after]


def test_the_copy_follows_an_update_of_the_weights() -> None:
    model = build_model("llama")
    engine = build_engine(model, weight_format="fp8")
    first = generate(engine)
    engine.pause()
    with torch.no_grad():
        for parameter in model.get_decoder().parameters():
            parameter.mul_(0.7)
    engine.resume(1)
    second = generate(engine)
    fresh = generate(build_engine(model, weight_format="fp8"))
    assert [one.sampled_ids for one in second] == [one.sampled_ids for one in fresh]
    assert get_logprobs(second).tolist() == get_logprobs(fresh).tolist()
    assert get_logprobs(first).tolist() != get_logprobs(second).tolist()


def test_an_unsupported_model_is_refused_with_the_knob() -> None:
    with pytest.raises(ConfigError, match="weight_format=fp8"):
        build_engine(build_model("llama", torch.float32), weight_format="fp8")
