"""Routers: the gates of replayed experts, what is recorded, and compiled layers."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DeepseekV2Config

from routes import GATES
from tiny_models import CONFIGS, LATENT_SIZES, MIXTURES, RECURRENT, build_tiny
from trainable_models import build_trainable
from tunesmith.config import LoraSection, TrainerSection
from tunesmith.errors import ModelError
from tunesmith.model.adapters.lora import add_adapter
from tunesmith.model.experts import RouteRecorder, RowRouting, build_route, find_routers
from tunesmith.model.forward.attention import CausalPlan, run_body, use_plan_attention
from tunesmith.model.towers import find_auto_class

CPU = torch.device("cpu")
IDS = torch.arange(3, 20)[None]
POSITIONS = torch.arange(IDS.shape[1])[None]
SETTINGS = TrainerSection(routing_replay=True, router_aux_loss_coef=0.1)
FAMILIES = [*MIXTURES, *(name for name in RECURRENT if "moe" in name)]


def build(name: str):
    model = copy.deepcopy(build_tiny(name)) if name in CONFIGS else build_trainable(name, dtype=torch.float32)
    use_plan_attention(model)
    return model


def run(model) -> torch.Tensor:
    return run_body(model, IDS, POSITIONS, CausalPlan([IDS.shape[1]], CPU))[0]


def watch(model) -> list[tuple[torch.Tensor, ...]]:
    """What the routers return in forwards that follow: logits, gates and experts."""
    outputs: list[tuple[torch.Tensor, ...]] = []
    for router in find_routers(model):
        router.register_forward_hook(
            lambda _module, _inputs, output: outputs.append(output if output[0].is_floating_point() else output[::-1])
        )
    return outputs


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_routes_replay_to_the_same_bits_and_others_are_followed(name):
    model = build(name)
    outputs = watch(model)
    recorder = RouteRecorder(model, num_slots=40, max_tokens=20)
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(0))[: IDS.shape[1]]
    expected = run(model)
    recorder.store(slots)
    found = recorder.read(slots.numpy())
    assert np.array_equal(found, torch.stack([chosen for _, _, chosen in outputs], dim=1).numpy())
    routing = RowRouting(model, TrainerSection(routing_replay=True), max_tokens=24)
    weights = np.ones(len(found))
    with routing.applied(len(found), found, weights):
        assert torch.equal(run(model), expected)
    totals = routing.take_totals()
    assert totals["routing/changed"][1] == totals["routing/unrecorded"][1] == 0
    others = (found + 1) % build_route(model)[2]
    others[3] = -1  # its own
    outputs.clear()
    with routing.applied(len(found), others, weights):
        run(model)
    chosen = torch.stack([chosen for _, _, chosen in outputs], dim=1).numpy()
    assert np.array_equal(np.delete(chosen, 3, axis=0), np.delete(others, 3, axis=0))
    totals = routing.take_totals()
    assert totals["routing/unrecorded"][1] == 1 and totals["routing/changed"][1] > len(found) / 2
    assert torch.equal(run(model), expected), "routers are as before"


@torch.no_grad()
@pytest.mark.parametrize("name", GATES)
def test_gates_of_replayed_experts_are_those_of_the_formula(name):
    model = build(name)
    outputs = watch(model)
    (_, num_layers, num_chosen), num_experts = build_route(model)[1].shape, build_route(model)[2]
    rng = np.random.default_rng(0)
    draw = [[rng.permutation(num_experts)[:num_chosen] for _ in range(num_layers)] for _ in range(IDS.shape[1])]
    routing = RowRouting(model, TrainerSection(routing_replay=True), max_tokens=24)
    with routing.applied(IDS.shape[1], np.array(draw, dtype=np.int8), np.ones(IDS.shape[1])):
        run(model)
    for layer, (logits, gates, chosen) in enumerate(outputs):
        assert np.array_equal(chosen.numpy(), np.array(draw)[:, layer])
        factor = getattr(find_routers(model)[layer], "routed_scaling_factor", 1.0)
        torch.testing.assert_close(gates.double(), GATES[name](logits.double(), chosen) * factor, atol=1e-6, rtol=1e-5)


def test_compiled_layers_follow_routes_that_change_between_rows():
    model = build("qwen3_moe").requires_grad_(False)
    routing = RowRouting(model, SETTINGS, max_tokens=24)
    layer, hidden = model.model.layers[1], torch.randn(1, 9, 32, requires_grad=True)
    angles = model.model.rotary_emb(hidden, torch.arange(9)[None])
    arguments = {"position_embeddings": angles, "attention_mask": None, "attention_plan": CausalPlan([9], CPU)}
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(type(layer).forward, backend=counter, fullgraph=True)
    recorder = RouteRecorder(model, num_slots=9, max_tokens=24)
    routes = []
    for forward in (compiled, type(layer).forward):
        with torch.no_grad():
            forward(layer, hidden, **arguments)
        recorder.store(torch.arange(9))
        routes.append(recorder.read(np.arange(9))[:, 1])
    assert np.array_equal(*routes) and routes[0].min() >= 0

    def compute(forward):
        output = forward(layer, hidden, **arguments)
        return output.detach(), torch.autograd.grad(output.sum(), hidden)[0]

    routing.set_balance(torch.rand(3, 2, 8, dtype=torch.float64))
    plain, *_ = compute(type(layer).forward)
    assert torch.equal(compute(compiled)[0], plain)
    rows = [np.full((9, 3, 2), (0, expert), dtype=np.int8) for expert in (3, 5)]
    for row in rows:
        with routing.applied(9, row, np.arange(9.0)):
            found, expected = compute(compiled), compute(type(layer).forward)
        assert not torch.allclose(found[0], plain)
        num_graphs = counter.frame_count
        with routing.applied(9, row, np.arange(9.0)):
            compiled(model.model.layers[2], hidden, **arguments)
        assert counter.frame_count == num_graphs, "layers share their graphs"
        for each, other in zip(found, expected, strict=True):
            torch.testing.assert_close(each, other)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_replayed_expert_outside_of_the_groups_that_the_router_chose_has_its_gate(is_compiled):
    """DeepSeek-V2 takes gates from scores in which all groups but the chosen ones are masked."""
    config = DeepseekV2Config(
        **LATENT_SIZES | {"n_group": 4, "topk_group": 1}, topk_method="group_limited_greedy", routed_scaling_factor=3.0
    )
    model = find_auto_class(config).from_config(config)
    use_plan_attention(model)
    router, hidden, chosen = find_routers(model)[0], torch.randn(4, 32), torch.tensor([[0, 7], [1, 2], [3, 4], [5, 6]])
    forward = (
        torch.compile(type(router).forward, backend="eager", fullgraph=True) if is_compiled else type(router).forward
    )
    router.replayed = (chosen.to(torch.int8), torch.zeros(4, dtype=torch.bool), 8)
    logits, gates, found = forward(router, hidden)
    assert torch.equal(found, chosen)
    torch.testing.assert_close(gates, 3 * logits.softmax(-1).gather(1, chosen))


def test_models_without_routers_are_refused():
    with pytest.raises(ModelError, match=r"LlamaForCausalLM has no routers of transformers: leave it out"):
        RowRouting(build("llama"), SETTINGS, max_tokens=8)


def test_the_load_counts_tokens_by_their_weight():
    model = build("glm4_moe")
    outputs = watch(model)
    routing, weights = RowRouting(model, TrainerSection(), max_tokens=24), np.arange(IDS.shape[1]) % 3
    with routing.applied(IDS.shape[1], None, weights):
        run(model)
    counts = [
        torch.bincount(each.repeat_interleave(torch.from_numpy(weights), dim=0).flatten(), minlength=8)
        for *_, each in outputs
    ]
    found = {name: value.item() for name, (_, value) in routing.take_totals().items()}
    assert found == {
        "routing/max_load": pytest.approx(max((each.max() / each.float().mean()).item() for each in counts)),
        "routing/unused": pytest.approx(sum((each == 0).sum().item() for each in counts) / (8 * len(counts))),
    }
    assert routing.take_totals()["routing/unused"][1] == 1


def test_adapters_of_experts_are_trained_with_replayed_routes():
    model = build("qwen3_moe")
    add_adapter(model, LoraSection(r=4, target_modules=("experts.down_proj",)), base="", dtype=torch.float32)
    use_plan_attention(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * parameter.requires_grad)
    routing, gradients = RowRouting(model, TrainerSection(routing_replay=True), max_tokens=24), []
    rows = [np.full((17, 3, 2), (0, expert), dtype=np.int8) for expert in (3, 5)]
    for row in rows:
        with routing.applied(17, row, np.ones(17)):
            run(model).square().sum().backward()
        factors = [each for name, each in model.named_parameters() if "lora_A" in name]
        gradients.append([each.grad.view(8, 4, -1).abs().amax(dim=(1, 2)) > 0 for each in factors])
        model.zero_grad()
    for used, expert in zip(gradients, (3, 5), strict=True):
        assert len(used) == 3 and all(each.nonzero()[:, 0].tolist() == [0, expert] for each in used)
