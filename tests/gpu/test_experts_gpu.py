"""Experts on a GPU: rows that do not depend on padding, no wait for the host, gradients of adapted experts, routes."""

from __future__ import annotations

import asyncio
import copy

import numpy as np
import pytest
import torch
from test_engine_gpu import GREEDY, build_model, compute_reference, generate_all
from test_trainer_gpu import build_samples, compute_error
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from routes import route_by_prefix
from tiny_models import CONFIGS, MIXTURES
from trainable_models import build_trainable
from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.config import AlgorithmSection, EngineSection, LoraSection, TrainerSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.errors import ConfigError
from tunesmith.model.adapters.lora import add_adapter
from tunesmith.model.experts import ROUTING, RowRouting, find_experts, find_routers
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.trainer.layers.compiled_layers import compiled_layers
from tunesmith.trainer.loss_pass import PassSetup, run_loss_pass
from tunesmith.trainer.optimizer import MasterAdamW
from tunesmith.trainer.packing import pack_samples
from tunesmith.trainer.trainer import Trainer
from tunesmith.trainer.update import prepare_update
from tunesmith.types import Sampling

pytestmark = pytest.mark.gpu
TARGETS = ("q_proj", "experts.gate_up_proj", "experts.down_proj")


def build_adapted(dtype: torch.dtype, name: str = "qwen3_moe") -> PreTrainedModel:
    """A model with a random adapter of its experts, on the CPU."""
    model = copy.deepcopy(build_trainable(name, dtype=torch.float32)).to(dtype)
    add_adapter(model, LoraSection(r=8, alpha=8, target_modules=TARGETS), base="", dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_((torch.randn(parameter.shape, generator=generator) * 0.1).bfloat16())
    return model.eval()


def build_experts() -> nn.Module:
    config = CONFIGS["qwen3_moe"]
    config.hidden_size, config.moe_intermediate_size, config.num_experts = 256, 128, 32
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()
    use_plan_attention(model)
    return next(module for _, module in find_experts(model))


def route(num_rows: int, *, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    hidden = torch.randn(num_rows, 256, device="cuda", generator=generator).bfloat16()
    chosen = torch.rand(num_rows, 32, device="cuda", generator=generator).topk(4)
    return hidden, chosen.indices, chosen.values.bfloat16()


@torch.inference_mode()
@pytest.mark.parametrize("num_rows", [1, 3, 17, 130])
def test_padding_rows_change_no_bit_of_other_rows(num_rows):
    """A captured batch is padded with rows of one token, which are routed too."""
    experts, rows = build_experts(), route(num_rows)
    expected = experts(*rows)
    for num_padding in (1, 5, 64):
        padding = [each[:1].expand(num_padding, -1) for each in route(1, seed=7)]
        found = experts(*[torch.cat([row, added]) for row, added in zip(rows, padding, strict=True)])
        assert torch.equal(found[:num_rows], expected), num_padding


def test_experts_and_their_gradients_never_wait_for_the_host_and_repeat_their_bits():
    experts = build_experts()
    hidden, chosen, weights = route(50)
    results = []
    for _ in range(3):
        inputs = hidden.clone().requires_grad_(True)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if results else "default")
        try:
            output = experts(inputs, chosen, weights)
            gradients = torch.autograd.grad(output.float().square().sum(), [inputs, *experts.parameters()])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append([output.detach(), *gradients])
    for found in results[1:]:
        assert all(map(torch.equal, found, results[0]))


@pytest.mark.parametrize("mode", ["graphs", "compiled"])
@pytest.mark.parametrize("name", [*MIXTURES, "qwen3_5_moe", "qwen2_5_vl", "qwen3_vl"])
def test_sampled_logprobs_are_close_to_a_full_forward(name, mode):
    model = build_model(name, torch.bfloat16)
    differences = []
    for prompt, completion in generate_all(model, Sampling(max_tokens=20), cuda_decode=mode):
        ids = torch.tensor(completion.sampled_ids, device="cuda")[:, None]
        expected = compute_reference(model, prompt, completion).gather(1, ids)[:, 0].cpu()
        differences.append((torch.tensor(completion.logprobs) - expected).abs())
    assert torch.cat(differences).median() < 0.1


@pytest.mark.parametrize("mode", ["graphs", "compiled"])
def test_adapted_experts_are_sampled(mode):
    model = build_adapted(torch.bfloat16).cuda()
    differences = []
    for prompt, completion in generate_all(model, Sampling(max_tokens=20), cuda_decode=mode):
        ids = torch.tensor(completion.sampled_ids, device="cuda")[:, None]
        expected = compute_reference(model, prompt, completion).gather(1, ids)[:, 0].cpu()
        differences.append((torch.tensor(completion.logprobs) - expected).abs())
    assert torch.cat(differences).median() < 0.1


def test_experts_in_float32_are_refused_where_they_cannot_be_captured():
    model = build_model("qwen3_moe", torch.float32)
    with pytest.raises(ConfigError, match="experts in torch.float32 cannot be captured .* engine.cuda_decode=eager"):
        generate_all(model, Sampling(max_tokens=2, distribution=GREEDY))
    assert generate_all(model, Sampling(max_tokens=2, distribution=GREEDY), cuda_decode="eager")


def collect_gradients(model: PreTrainedModel, *, is_compiled: bool, has_replay: bool = False) -> dict[str, Tensor]:
    samples = build_samples(4)
    if has_replay:
        samples = route_by_prefix(samples)
        setattr(model, ROUTING, RowRouting(model, TrainerSection(routing_replay=True), max_tokens=2000))
    rows = pack_samples(samples, max_tokens_per_row=1000, has_prefix_sharing=True, hidden_size=32)
    algorithm = resolve_algorithm(AlgorithmSection())
    optimizer = MasterAdamW(model, TrainerSection())
    setup = PassSetup(model=model, chunk_tokens=256, compiled=(model,) if is_compiled else ())
    inputs = prepare_update(setup, algorithm, samples, rows).inputs
    with compiled_layers(*setup.compiled):
        run_loss_pass(setup, algorithm, samples, rows, inputs)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = {name: parameter.grad.double().cpu() for name, parameter in trained.items()}
    optimizer.clear_gradients()
    return gradients


@pytest.mark.parametrize("has_replay", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_gradients_of_adapted_experts_agree_with_float64_on_the_cpu(is_compiled, has_replay):
    """The GPU's path for gradients of linear layers must not replace those of the factors by zero."""
    exact = collect_gradients(build_adapted(torch.float64), is_compiled=False, has_replay=has_replay)
    found = collect_gradients(build_adapted(torch.float32).cuda(), is_compiled=is_compiled, has_replay=has_replay)
    assert any(".experts." in name for name in exact)
    for name, gradient in exact.items():
        assert compute_error(found[name], gradient) < 1e-3, name


def test_a_step_in_bfloat16_moves_the_factors_of_every_adapted_weight():
    model = build_adapted(torch.bfloat16).cuda()
    before = {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}
    settings = TrainerSection(learning_rate=1e-2, mismatch_stop=1e9, mismatch_warn=1e9)
    trainer = Trainer(model, settings, AlgorithmSection(), max_model_len=256, num_total_steps=4)
    for _ in range(3):  # the second row of a size is captured, the third replayed
        metrics = trainer.step(build_samples(8))
    assert metrics["routing/max_load"] > 1
    state = dict(model.named_parameters())
    assert not [name for name, each in before.items() if torch.equal(each, state[name])]


def compute_routes(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """Routes [T, L, K] of a full forward."""
    chosen: list[Tensor] = []
    handles = [
        router.register_forward_hook(lambda _module, _inputs, output: chosen.append(output[2]))
        for router in find_routers(model)
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([token_ids], device="cuda"))
    for handle in handles:
        handle.remove()
    return torch.stack(chosen, dim=1).sort(dim=-1).values.cpu()


@pytest.mark.parametrize(
    ("mode", "settings"),
    [("graphs", {}), ("compiled", {}), ("compiled", {"kv_cache_tokens": 140, "max_batched_tokens": 11}), ("eager", {})],
)
@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "gpt_oss"])
def test_recorded_routes_are_those_of_a_full_forward(name, mode, settings):
    """But for tokens that rounding moves; a route in the wrong place would agree in one layer out of ten."""
    model = build_model(name, torch.float32 if mode == "eager" else torch.bfloat16)
    section = EngineSection(**({"page_size": 4, "kv_cache_tokens": 4000, "cuda_decode": mode} | settings))
    engine = LocalEngine(model, None, section, max_model_len=128)
    engine.record_routes()
    shared = torch.randint(0, 97, (21,), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = [[*shared, *range(length)] for length in (3, 17, 30, 4, 65, 8)]

    async def run(asked: list[list[int]]) -> list:
        requests = [Sampling(max_tokens=12 + index, seed=index, ignore_eos=True) for index in range(len(asked))]
        return await asyncio.gather(*map(engine.generate, asked, requests))

    async def run_turns() -> list[tuple[list[int], np.ndarray]]:
        played, asked = [], prompts
        for _ in range(2):
            replies = await run(asked)
            turns = [[*ids, *reply.sampled_ids] for ids, reply in zip(asked, replies, strict=True)]
            played += zip(turns, [reply.routes for reply in replies], strict=True)
            asked = [[*ids, 7, 8, 9] for ids in turns]
        return played

    same = []
    for token_ids, routes in asyncio.run(run_turns()):
        expected = compute_routes(model, token_ids[:-1])
        same.append((torch.from_numpy(np.sort(routes).astype(np.int64)) == expected).all(dim=-1).flatten())
    assert torch.cat(same).float().mean() > (0.999 if mode == "eager" else 0.85)
