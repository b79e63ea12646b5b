"""Rewritten layers compute what the modelling code computes, in the parts that they are meant to have."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional

from tiny_models import build_tiny
from trainable_models import build_deep
from tunesmith.engine.batch.kv_cache import KVCache
from tunesmith.engine.core.span import Span
from tunesmith.engine.cuda.attention_plans import build_decode_plan, build_prefill_plan
from tunesmith.engine.cuda.custom_ops import Prologue
from tunesmith.engine.cuda.fx_passes import LayerFunctions, rewrite_layer
from tunesmith.engine.cuda.layer_fusion import FusedLayers
from tunesmith.engine.cuda.merged_weights import find_runs, join_neighbours, lay_side_by_side
from tunesmith.engine.worker.model_runner import probe_layers
from tunesmith.model.forward.attention import run_body, use_plan_attention

CPU = torch.device("cpu")


def norm(inputs: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = inputs.float()
    normed = (wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt()).to(inputs.dtype)
    return (normed * weight).to(weight.dtype)


def rotate(heads_1HTD: Tensor, prologue: Prologue) -> Tensor:
    first, second = heads_1HTD.chunk(2, dim=-1)
    return heads_1HTD * prologue.cos_1TD + torch.cat((-second, first), dim=-1) * prologue.sin_1TD


def attend(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, table: Tensor,
    places: list[tuple[int, int]], scaling: float, window: int, softcap: float, prologue: Prologue | None,
) -> Tensor:  # fmt: skip
    """Token by token: `places` holds request and position of each."""
    if prologue is not None:
        if prologue.query_norm_D is not None and prologue.key_norm_D is not None:
            query, key = (
                norm(heads, weight, prologue.epsilon)
                for heads, weight in ((query, prologue.query_norm_D), (key, prologue.key_norm_D))
            )
        query, key = rotate(query, prologue), rotate(key, prologue)
    num_heads, size, page_size = keys.shape[1], keys.shape[3], keys.shape[2]
    for token, (request, position) in enumerate(places):
        page = table[request, position // page_size]
        keys[page, :, position % page_size], values[page, :, position % page_size] = (
            key[0, :, token],
            value[0, :, token],
        )
    outputs = []
    for token, (request, position) in enumerate(places):
        first = max(0, position - window + 1) if window else 0
        kept = [
            pages[table[request].long()].transpose(0, 1).reshape(num_heads, -1, size)[:, first : position + 1]
            for pages in (keys, values)
        ]
        scores = query[0, :, token].view(num_heads, -1, size) @ kept[0].transpose(1, 2) * scaling
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        outputs.append((scores.softmax(-1) @ kept[1]).reshape(-1, size))
    return torch.stack(outputs)[None]


def decode(*tensors_and_numbers: Any) -> Tensor:
    query, key, value, keys, values, table, positions, scaling, window, softcap, *prologue = tensors_and_numbers
    places = list(enumerate(positions.tolist()))
    return attend(query, key, value, keys, values, table, places, scaling, window, softcap, *(prologue or [None]))


def prefill(*tensors_and_numbers: Any) -> Tensor:
    query, key, value, keys, values, slots, table, spans, _, scaling, window, softcap, *prologue = tensors_and_numbers
    ranges = enumerate(zip(spans[1].tolist(), spans[2].tolist(), strict=True))
    places = [(request, position) for request, ends in ranges for position in range(*ends)]
    page_size = keys.shape[2]
    assert slots.tolist() == [int(table[r, p // page_size]) * page_size + p % page_size for r, p in places]
    return attend(query, key, value, keys, values, table, places, scaling, window, softcap, *(prologue or [None]))


torch.library.impl("tunesmith::paged_decode", "CPU")(decode)
torch.library.impl("tunesmith::paged_prefill", "CPU")(prefill)


def build_functions(calls: Counter[str]) -> LayerFunctions:
    def multiply(inputs: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...]) -> list[Tensor]:
        calls[f"multiply by {len(weights)}"] += 1
        return [functional.linear(inputs, *layer) for layer in zip(weights, biases, strict=True)]

    def gate(inputs: Tensor, gate_weight: Tensor, value_weight: Tensor) -> Tensor:
        return functional.silu(inputs @ gate_weight.T) * (inputs @ value_weight.T)

    def add_product(total: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        return total.add_(inputs @ weight.T)

    def count(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            calls[name] += 1
            return function(*arguments)

        return counted

    return LayerFunctions(
        norm=count("norm", norm),
        multiply=multiply,
        gate=count("gate", gate),
        add_product=count("add product", add_product),
        decode=count("decode", decode),
        prefill=count("prefill", prefill),
    )


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("is_wide", [False, True])
@torch.inference_mode()
def test_a_layer_becomes_eight_steps_that_give_the_same_hidden_states(name: str, is_wide: bool) -> None:
    """In float32, or in bfloat16 with residuals in float32."""
    model = build_deep(name, is_wide=True) if is_wide else copy.deepcopy(build_tiny(name))
    use_plan_attention(model)
    calls: Counter[str] = Counter()
    fused = FusedLayers(model, build_functions(calls), max_positions=32)
    cache = KVCache(probe_layers(model), num_blocks=40, block_size=4, dtype=model.dtype, device=CPU)
    ids = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    pages = [list(range(3, 10)), list(range(20, 27))]
    spans = [Span(0, 0, 11, pages[0]), Span(11, 0, 5, pages[1])]
    positions = torch.tensor([11, 5])
    with fused.installed():
        plan = build_prefill_plan(cache, spans, tile_tokens=8, device=CPU)
        row, places = torch.cat([ids[0, :11], ids[1, :5]]), torch.cat([torch.arange(11), torch.arange(5)])
        prefilled = run_body(model, row[None], places[None], plan)[0]
        plan = build_decode_plan(cache, torch.tensor(pages, dtype=torch.int32), positions)
        decoded = run_body(model, ids[[0, 1], positions][None], positions[None], plan)[0]
    num_layers, num_last_norms = len(model.get_decoder().layers), 0 if is_wide else 2
    assert calls == {
        "norm": 4 * num_layers + num_last_norms, "multiply by 3": 2 * num_layers, "gate": 2 * num_layers,
        "add product": 4 * num_layers, "prefill": num_layers, "decode": num_layers,
    }  # fmt: skip
    assert all("forward" not in layer.__dict__ for layer in model.get_decoder().layers)
    whole = [model.get_decoder()(input_ids=row[None]).last_hidden_state[0] for row in (ids[0], ids[1, :6])]
    for ours, expected in (
        (prefilled, torch.cat([whole[0][:11], whole[1][:5]])),
        (decoded, torch.stack([whole[0][11], whole[1][5]])),
    ):
        assert ours.dtype == model.dtype
        if is_wide:
            assert (ours - expected).norm() < 0.01 * expected.norm()
        else:
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def rewrite(function: Callable[..., Any], *inputs: Any) -> tuple[Any, bool, Counter[str]]:
    """What the rewritten function returns, whether it was rewritten whole, and what it called."""
    calls: Counter[str] = Counter()
    outcomes = []

    def lower(module: fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        outcomes.append(rewrite_layer(module, build_functions(calls)))
        module.recompile()
        return module.forward

    torch._dynamo.reset()
    with torch._dynamo.config.patch(specialize_float=True):
        output = torch.compile(function, backend=lower, fullgraph=True)(*inputs)
    (is_whole,) = outcomes
    return output, is_whole, calls


@torch.inference_mode()
def test_a_residual_that_is_read_again_is_not_overwritten() -> None:
    x, a, w = torch.randn(2, 3, 8), torch.randn(2, 3, 5), torch.randn(8, 5)
    kept = x.clone()
    output, is_whole, calls = rewrite(lambda x, a, w: (x + functional.linear(a, w)) * x, x, a, w)
    torch.testing.assert_close(output, (kept + a @ w.T) * kept)
    torch.testing.assert_close(x, kept)
    assert is_whole
    assert not calls


@torch.inference_mode()
def test_another_normalisation_is_left_to_the_compiler() -> None:
    x, w = torch.randn(2, 3, 8), torch.randn(8)
    output, is_whole, calls = rewrite(lambda x, w: w * (x - x.mean(-1, keepdim=True)), x, w)
    torch.testing.assert_close(output, w * (x - x.mean(-1, keepdim=True)))
    assert not is_whole
    assert not calls


@pytest.mark.parametrize("is_narrowed", [False, True])
@torch.inference_mode()
def test_a_norm_of_wider_inputs_is_replaced_only_where_its_output_becomes_as_narrow_as_its_weight(is_narrowed) -> None:
    x, w = torch.randn(2, 3, 8), torch.randn(8).bfloat16()

    def compute(x: Tensor, w: Tensor) -> Tensor:
        normed = w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
        return normed.to(torch.bfloat16) if is_narrowed else normed

    output, is_whole, calls = rewrite(compute, x, w)
    torch.testing.assert_close(output, compute(x, w))
    assert is_whole is is_narrowed
    assert calls == ({"norm": 1} if is_narrowed else {})


@torch.inference_mode()
def test_a_product_joins_a_residual_of_its_own_type_or_a_wider_one_only() -> None:
    a, w = torch.randn(2, 3, 5), torch.randn(8, 5)
    for residual, product, num_joined in (
        (torch.float32, torch.bfloat16, 1), (torch.bfloat16, torch.bfloat16, 1), (torch.bfloat16, torch.float32, 0)
    ):  # fmt: skip
        x, a, w = torch.randn(2, 3, 8).to(residual), a.to(product), w.to(product)
        expected = x + a @ w.T
        output, is_whole, calls = rewrite(lambda x, a, w: x + functional.linear(a, w), x, a, w)
        torch.testing.assert_close(output, expected)
        assert is_whole
        assert calls["add product"] == num_joined


@torch.inference_mode()
def test_a_gate_of_two_inputs_is_no_gate() -> None:
    x, y, w = torch.randn(1, 3, 8), torch.randn(1, 3, 8), torch.randn(4, 8)

    def compute(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return functional.silu(functional.linear(x, w)) * functional.linear(y, w)

    output, is_whole, calls = rewrite(compute, x, y, w)
    torch.testing.assert_close(output, compute(x, y, w))
    assert not is_whole
    assert not calls


@torch.no_grad()
def test_neighbours_share_one_tensor_and_stay_the_parameters_that_they_were(tmp_path) -> None:
    model = copy.deepcopy(build_tiny("qwen2"))
    ids = torch.arange(9)[None]
    parameters, expected = dict(model.named_parameters()), model(input_ids=ids).logits
    lay_side_by_side(model)
    for layer in model.get_decoder().layers:
        attention, mlp = layer.self_attn, layer.mlp
        for group in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            for attribute in ("weight", "bias"):
                tensors = [getattr(part, attribute) for part in group]
                if tensors[0] is not None:
                    joined = join_neighbours(tensors)
                    assert joined is not None
                    torch.testing.assert_close(joined, torch.cat(list(tensors)))
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    torch.testing.assert_close(model(input_ids=ids).logits, expected)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    lay_side_by_side(model)
    assert pointers == [parameter.data_ptr() for parameter in model.parameters()]
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


@torch.no_grad()
def test_an_update_in_place_is_seen_through_the_joined_tensor() -> None:
    model = copy.deepcopy(build_tiny("llama"))
    lay_side_by_side(model)
    attention = model.get_decoder().layers[0].self_attn
    weights = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    joined = join_neighbours(weights)
    assert joined is not None
    attention.k_proj.weight.add_(1.0)
    torch.testing.assert_close(joined, torch.cat(weights))
    attention.k_proj.weight.data = attention.k_proj.weight.data.clone()
    assert join_neighbours(weights) is None


def test_runs_of_neighbours_are_found_among_other_weights() -> None:
    whole, biases = torch.randn(9, 4), torch.randn(9)
    first, second, third = whole.split([2, 3, 4])
    between = torch.randn(5, 4)
    assert find_runs([first, between, second, third], [None] * 4) == [[0, 2, 3], [1]]
    assert find_runs([second, first], [None] * 2) == [[0], [1]]
    assert find_runs([first, second], [biases[:2], biases[2:5]]) == [[0, 1]]
    assert find_runs([first, second], [biases[:2], None]) == [[0], [1]]
    assert find_runs([first, second], [biases[:2], biases[3:6]]) == [[0], [1]]
