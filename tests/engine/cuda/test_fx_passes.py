"""Fused layers compute what the modeling code computes, in the expected fused operations."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional

from tiny_models import build_tiny
from trainable_models import build_deep
from tunesmith.config import LoraSection
from tunesmith.engine.batch.kv_cache import KVCache
from tunesmith.engine.core.span import Span
from tunesmith.engine.cuda import custom_ops as ops
from tunesmith.engine.cuda.attention_plans import build_decode_plan, build_prefill_plan
from tunesmith.engine.cuda.decode_work import DecodeWork, Divider, Kind
from tunesmith.engine.cuda.layer_fusion import FusedLayers
from tunesmith.engine.worker.model_runner import probe_layers
from tunesmith.errors import ModelError
from tunesmith.model.adapters.lora import add_adapter
from tunesmith.model.forward.attention import run_body, use_plan_attention
from tunesmith.model.forward.fx_passes import FusedOps, QuantizedOps, fuse_layer
from tunesmith.model.kernels.prologue import Prologue
from tunesmith.model.merged_weights import (
    accumulate_weight_grads,
    find_merged_groups,
    find_merged_tensors,
    get_merged_view,
    merge_weights,
)

CPU = torch.device("cpu")


def rms_norm(inputs: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = inputs.float()
    normed = (wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt()).to(inputs.dtype)
    return (normed * weight).to(weight.dtype)


def rotate(heads_1HTD: Tensor, prologue: Prologue) -> Tensor:
    first, second = heads_1HTD.chunk(2, dim=-1)
    return heads_1HTD * prologue.cos_1TD + torch.cat((-second, first), dim=-1) * prologue.sin_1TD


def attend(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, table: Tensor,
    places: list[tuple[int, int]], scaling: float, window: int, softcap: float, sinks: Tensor | None,
    prologue: Prologue | None = None,
) -> Tensor:  # fmt: skip
    """Reference attention, token by token; `places` holds each token's request and position."""
    assert sinks is None
    if prologue is not None:
        if prologue.query_norm_D is not None and prologue.key_norm_D is not None:
            query, key = (
                rms_norm(heads, weight, prologue.epsilon)
                for heads, weight in ((query, prologue.query_norm_D), (key, prologue.key_norm_D))
            )
        query, key = rotate(query, prologue), rotate(key, prologue)
    num_heads, size, block_size = keys.shape[1], keys.shape[3], keys.shape[2]
    for token, (request, position) in enumerate(places):
        block = table[request, position // block_size]
        keys[block, :, position % block_size], values[block, :, position % block_size] = (
            key[0, :, token],
            value[0, :, token],
        )
    outputs = []
    for token, (request, position) in enumerate(places):
        first = max(0, position - window + 1) if window else 0
        kept = [
            cached[table[request].long()].transpose(0, 1).reshape(num_heads, -1, size)[:, first : position + 1]
            for cached in (keys, values)
        ]
        scores = query[0, :, token].view(num_heads, -1, size) @ kept[0].transpose(1, 2) * scaling
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        outputs.append((scores.softmax(-1) @ kept[1]).reshape(-1, size))
    return torch.stack(outputs)[None]


def paged_decode(*tensors_and_numbers: Any) -> Tensor:
    query, key, value, keys, values, table, positions, _, _, scaling, window, softcap, *prologue = tensors_and_numbers
    places = list(enumerate(positions.tolist()))
    return attend(query, key, value, keys, values, table, places, scaling, window, softcap, *(prologue or [None]))


def paged_prefill(*tensors_and_numbers: Any) -> Tensor:
    query, key, value, keys, values, slots, table, spans, _, scaling, window, softcap, *prologue = tensors_and_numbers
    ranges = enumerate(zip(spans[1].tolist(), spans[2].tolist(), strict=True))
    places = [(request, position) for request, ends in ranges for position in range(*ends)]
    block_size = keys.shape[2]
    assert slots.tolist() == [int(table[r, p // block_size]) * block_size + p % block_size for r, p in places]
    return attend(query, key, value, keys, values, table, places, scaling, window, softcap, *(prologue or [None]))


torch.library.impl("tunesmith::paged_decode", "CPU")(paged_decode)
torch.library.impl("tunesmith::paged_prefill", "CPU")(paged_prefill)


def build_ops(calls: Counter[str]) -> FusedOps:
    def merged_linear(inputs: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...]) -> list[Tensor]:
        calls[f"merged linear of {len(weights)}"] += 1
        return [functional.linear(inputs, *layer) for layer in zip(weights, biases, strict=True)]

    def silu_and_mul(gate: Tensor, value: Tensor) -> Tensor:
        return functional.silu(gate) * value

    def add_adapters(
        totals: list[Tensor], inputs: Tensor, downs: list[Tensor], ups: list[Tensor], factors: list[float]
    ) -> list[Tensor]:
        calls[f"adapters of {len(totals)}"] += 1
        layers = zip(totals, downs, ups, factors, strict=True)
        return [total.add_(factor * (inputs @ down.T) @ up.T) for total, down, up, factor in layers]

    def add_linear(total: Tensor, inputs: Tensor, weight: Tensor, factor: float = 1.0) -> Tensor:
        return total.add_(factor * inputs @ weight.T)

    def count(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            calls[name] += 1
            return function(*arguments)

        return counted

    return FusedOps(
        rms_norm=count("rms norm", rms_norm),
        merged_linear=merged_linear,
        silu_and_mul=count("silu and mul", silu_and_mul),
        add_linear=count("add linear", add_linear),
        add_adapters=add_adapters,
        attention={
            ops.paged_decode: count("paged decode", paged_decode),
            ops.paged_prefill: count("paged prefill", paged_prefill),
        },
    )


@pytest.mark.parametrize(
    ("name", "has_fp32_residual"),
    [("llama", False), ("qwen2", True), ("qwen3", False), ("mistral", False)],
)
@torch.inference_mode()
def test_a_layer_is_fused_into_eight_operations_with_the_same_hidden_states(
    name: str, has_fp32_residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, or in bfloat16 with a float32 residual stream, whose last norm is left to the compiler."""
    # torch's compiler would compile C++ for many seconds
    monkeypatch.setattr("tunesmith.model.forward.fx_passes.compile_fx", lambda module, inputs: module.forward)
    model = build_deep(name, has_fp32_residual=True) if has_fp32_residual else copy.deepcopy(build_tiny(name))
    use_plan_attention(model)
    calls: Counter[str] = Counter()
    fused = FusedLayers(model, build_ops(calls), max_positions=32)
    cache = KVCache(probe_layers(model), num_blocks=40, block_size=4, dtype=model.dtype, device=CPU)
    ids = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    blocks = [list(range(3, 10)), list(range(20, 27))]
    spans = [Span(0, 0, 11, blocks[0]), Span(11, 0, 5, blocks[1])]
    positions = torch.tensor([11, 5])
    with fused.installed():
        plan = build_prefill_plan(cache, spans, tile_tokens=8, device=CPU)
        row, places = torch.cat([ids[0, :11], ids[1, :5]]), torch.cat([torch.arange(11), torch.arange(5)])
        prefilled = run_body(model, row[None], places[None], plan)[0]
        divider = Divider(block_size=4, num_kv_heads=1, num_heads=1, head_size=16, num_sms=1, window=0)
        division_7S = torch.zeros((7, 2), dtype=torch.int32)
        work = DecodeWork.allocate(divider, Kind.WHOLE, positions, division_7S)
        plan = build_decode_plan(cache, torch.tensor(blocks, dtype=torch.int32), work, torch.zeros(2, dtype=torch.long))
        decoded = run_body(model, ids[[0, 1], positions][None], positions[None], plan)[0]
    num_layers, num_last_norms = len(model.get_decoder().layers), 0 if has_fp32_residual else 2
    assert calls == {
        "rms norm": 4 * num_layers + num_last_norms, "merged linear of 3": 2 * num_layers,
        "merged linear of 2": 2 * num_layers, "silu and mul": 2 * num_layers, "add linear": 4 * num_layers,
        "paged prefill": num_layers, "paged decode": num_layers,
    }  # fmt: skip
    assert all("forward" not in layer.__dict__ for layer in model.get_decoder().layers)
    whole = [model.get_decoder()(input_ids=row[None]).last_hidden_state[0] for row in (ids[0], ids[1, :6])]
    for ours, expected in (
        (prefilled, torch.cat([whole[0][:11], whole[1][:5]])),
        (decoded, torch.stack([whole[0][11], whole[1][5]])),
    ):
        assert ours.dtype == model.dtype
        if has_fp32_residual:
            assert (ours - expected).norm() < 0.01 * expected.norm()
        else:
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("targets", "merged_sizes", "calls_per_layer"),
    [
        ("attention", [3, 1], {"adapters of 3": 1, "adapters of 1": 1}),
        ("all-linear", [3, 1, 2, 1], {"adapters of 3": 1, "adapters of 2": 1, "adapters of 1": 2}),
        (("q_proj", "v_proj", "up_proj"), [1, 1, 1], {"adapters of 2": 1, "adapters of 1": 1}),
    ],
)
@pytest.mark.parametrize(("name", "dropout"), [("llama", 0.5), ("qwen2", 0.0), ("qwen3", 0.0)])
@torch.inference_mode()
def test_adapters_of_layers_with_one_input_are_applied_at_once(
    name: str, dropout: float, targets: Any, merged_sizes: list[int], calls_per_layer: dict[str, int]
) -> None:
    model = copy.deepcopy(build_tiny(name))
    add_adapter(model, LoraSection(r=4, dropout=dropout, target_modules=targets), base="", dtype=model.dtype)
    for key, weight in model.named_parameters():
        if "lora_B" in key:
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * 0.3)
    model.eval()
    use_plan_attention(model)
    ids = torch.randint(0, 97, (11,), generator=torch.Generator().manual_seed(0))
    expected = model.get_decoder()(input_ids=ids[None]).last_hidden_state[0]
    merge_weights(model)
    num_layers = len(model.get_decoder().layers)
    merged = find_merged_tensors(model.get_decoder())
    for axis in (0, 1):
        found_sizes = [len(group) for group in merged if group[0].shape[axis] == 4]
        assert sorted(found_sizes) == sorted(merged_sizes * num_layers)
    calls: Counter[str] = Counter()
    fused = FusedLayers(model, build_ops(calls), max_positions=32)
    cache = KVCache(probe_layers(model), num_blocks=40, block_size=4, dtype=model.dtype, device=CPU)
    with fused.installed():
        plan = build_prefill_plan(cache, [Span(0, 0, 11, list(range(3, 10)))], tile_tokens=8, device=CPU)
        found = run_body(model, ids[None], torch.arange(11)[None], plan)[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    each = ("merged linear of 3", "merged linear of 2", "silu and mul", "paged prefill")
    calls_per_layer = {**calls_per_layer, **dict.fromkeys(each, 1), "add linear": 2}
    assert calls == {
        "rms norm": 2 * num_layers + 1, **{call: count * num_layers for call, count in calls_per_layer.items()}
    }  # fmt: skip


class Rounded:
    """What a quantizing operation returns: not a tensor, so that only products can read it."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows


def build_quantized_ops(calls: Counter[str]) -> FusedOps:
    """As `build_ops`, without rounding; products count the inputs that they have to quantize themselves."""

    def read(inputs: Any) -> Tensor:
        calls["quantized by a product"] += not isinstance(inputs, Rounded)
        return inputs.rows if isinstance(inputs, Rounded) else inputs

    def swiglu(inputs: Any, gate_weight: Tensor, value_weight: Tensor) -> Rounded:
        calls["swiglu"] += 1
        rows = read(inputs)
        return Rounded(functional.silu(rows @ gate_weight.T) * (rows @ value_weight.T))

    plain = build_ops(calls)
    return dataclasses.replace(
        plain,
        merged_linear=lambda inputs, *rest: plain.merged_linear(read(inputs), *rest),
        add_linear=lambda total, inputs, *rest: plain.add_linear(total, read(inputs), *rest),
        quantized=QuantizedOps(
            rms_norm=lambda *arguments: Rounded(plain.rms_norm(*arguments)),
            swiglu=swiglu,
        ),
    )


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@torch.inference_mode()
def test_quantized_layers_quantize_norms_and_gated_products_where_they_are_computed(name: str) -> None:
    """Of four inputs of products in a layer, only the output of attention is left to the product."""
    model = copy.deepcopy(build_tiny(name))
    use_plan_attention(model)
    calls: Counter[str] = Counter()
    fused = FusedLayers(model, build_quantized_ops(calls), max_positions=32)
    cache = KVCache(probe_layers(model), num_blocks=40, block_size=4, dtype=model.dtype, device=CPU)
    ids = torch.randint(0, 97, (11,), generator=torch.Generator().manual_seed(0))
    with fused.installed():
        plan = build_prefill_plan(cache, [Span(0, 0, 11, list(range(3, 10)))], tile_tokens=8, device=CPU)
        found = run_body(model, ids[None], torch.arange(11)[None], plan)[0]
    num_layers = len(model.get_decoder().layers)
    assert calls["quantized by a product"] == num_layers
    assert (calls["merged linear of 3"], calls["swiglu"], calls["add linear"]) == (num_layers,) * 2 + (2 * num_layers,)
    expected = model.get_decoder()(input_ids=ids[None]).last_hidden_state[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_a_quantized_layer_with_other_operations_is_refused() -> None:
    model = copy.deepcopy(build_tiny("gemma2"))
    use_plan_attention(model)
    fused = FusedLayers(model, build_quantized_ops(Counter()), max_positions=32)
    cache = KVCache(probe_layers(model), num_blocks=40, block_size=4, dtype=model.dtype, device=CPU)
    plan = build_prefill_plan(cache, [Span(0, 0, 3, [1])], tile_tokens=8, device=CPU)
    with (
        fused.installed(),
        pytest.raises(ModelError, match="weight_format=fp8 is not supported for Gemma2DecoderLayer"),
    ):
        run_body(model, torch.arange(3)[None], torch.arange(3)[None], plan)


@torch.inference_mode()
def test_a_single_linear_layer_is_a_product_of_quantized_layers() -> None:
    x, a, w = torch.randn(1, 3, 8), torch.randn(8), torch.randn(5, 8)

    def compute(x: Tensor, a: Tensor, w: Tensor) -> Tensor:
        normed = a * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
        return functional.linear(normed, w)

    output, is_whole, calls = fuse(compute, x, a, w, build=build_quantized_ops)
    torch.testing.assert_close(output, compute(x, a, w))
    assert is_whole
    assert (calls["merged linear of 1"], calls["quantized by a product"]) == (1, 0)


def fuse(
    function: Callable[..., Any], *inputs: Any, build: Callable[[Counter[str]], FusedOps] = build_ops
) -> tuple[Any, bool, Counter[str]]:
    """The fused function's output, whether it was fused completely, and the fused operations it called."""
    calls: Counter[str] = Counter()
    results = []

    def backend(module: fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        results.append(fuse_layer(module, build(calls)))
        module.recompile()
        return module.forward

    torch._dynamo.reset()
    with torch._dynamo.config.patch(specialize_float=True):
        output = torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    (is_whole,) = results
    return output, is_whole, calls


@torch.inference_mode()
def test_a_residual_that_is_read_again_is_not_overwritten() -> None:
    x, a, w = torch.randn(2, 3, 8), torch.randn(2, 3, 5), torch.randn(8, 5)
    kept = x.clone()
    output, is_whole, calls = fuse(lambda x, a, w: (x + functional.linear(a, w)) * x, x, a, w)
    torch.testing.assert_close(output, (kept + a @ w.T) * kept)
    torch.testing.assert_close(x, kept)
    assert is_whole
    assert calls == {"merged linear of 1": 1}


@torch.inference_mode()
def test_a_norm_other_than_rms_norm_is_left_to_the_compiler() -> None:
    x, w = torch.randn(2, 3, 8), torch.randn(8)
    output, is_whole, calls = fuse(lambda x, w: w * (x - x.mean(-1, keepdim=True)), x, w)
    torch.testing.assert_close(output, w * (x - x.mean(-1, keepdim=True)))
    assert not is_whole
    assert not calls


@pytest.mark.parametrize("is_narrowed", [False, True])
@torch.inference_mode()
def test_a_norm_of_wider_inputs_is_fused_only_if_its_output_is_cast_to_the_weights_dtype(is_narrowed) -> None:
    x, w = torch.randn(2, 3, 8), torch.randn(8).bfloat16()

    def compute(x: Tensor, w: Tensor) -> Tensor:
        normed = w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
        return normed.to(torch.bfloat16) if is_narrowed else normed

    output, is_whole, calls = fuse(compute, x, w)
    torch.testing.assert_close(output, compute(x, w))
    assert is_whole is is_narrowed
    assert calls == ({"rms norm": 1} if is_narrowed else {})


@torch.inference_mode()
def test_a_linear_is_fused_into_a_residual_of_its_own_or_a_wider_dtype_only() -> None:
    a, w = torch.randn(2, 3, 5), torch.randn(8, 5)
    for residual, product, num_fused in (
        (torch.float32, torch.bfloat16, 1), (torch.bfloat16, torch.bfloat16, 1), (torch.bfloat16, torch.float32, 0)
    ):  # fmt: skip
        x, a, w = torch.randn(2, 3, 8).to(residual), a.to(product), w.to(product)
        expected = x + a @ w.T
        output, is_whole, calls = fuse(lambda x, a, w: x + functional.linear(a, w), x, a, w)
        torch.testing.assert_close(output, expected)
        assert is_whole
        assert calls["add linear"] == num_fused


@torch.inference_mode()
def test_factors_of_products_are_multiplied_and_a_product_that_is_read_twice_is_not_added_in_place() -> None:
    x, a, w, v = torch.randn(2, 3, 8), torch.randn(2, 3, 5), torch.randn(8, 5), torch.randn(8, 5)

    def scale(x: Tensor, a: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return x + (functional.linear(a, w) + functional.linear(a, v) * 3.0) * 0.5

    def read_twice(x: Tensor, a: Tensor, w: Tensor, v: Tensor) -> Tensor:
        product = functional.linear(a, w) * 3.0
        return (x + product) * product

    for compute, num_fused in ((scale, 2), (read_twice, 0)):
        expected = compute(x, a, w, v)
        output, is_whole, calls = fuse(compute, x.clone(), a, w, v)
        torch.testing.assert_close(output, expected)
        assert is_whole
        assert calls["add linear"] == num_fused


@torch.inference_mode()
def test_a_gate_and_value_of_different_inputs_are_products_of_their_own() -> None:
    x, y, w = torch.randn(1, 3, 8), torch.randn(1, 3, 8), torch.randn(4, 8)

    def compute(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return functional.silu(functional.linear(x, w)) * functional.linear(y, w)

    output, is_whole, calls = fuse(compute, x, y, w)
    torch.testing.assert_close(output, compute(x, y, w))
    assert is_whole
    assert calls == {"merged linear of 1": 2, "silu and mul": 1}


@torch.inference_mode()
def test_products_of_other_products_are_fused() -> None:
    """As in adapters."""
    x, a, b = torch.randn(1, 3, 8), torch.randn(4, 8), torch.randn(8, 4)

    def compute(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return functional.linear(functional.linear(x, a), b) * 2

    output, is_whole, calls = fuse(compute, x, a, b)
    torch.testing.assert_close(output, compute(x, a, b))
    assert is_whole
    assert calls == {"merged linear of 1": 2}


@torch.no_grad()
def test_merged_weights_share_one_tensor_and_keep_the_models_parameters(tmp_path) -> None:
    model = copy.deepcopy(build_tiny("qwen2"))
    ids = torch.arange(9)[None]
    parameters, expected = dict(model.named_parameters()), model(input_ids=ids).logits
    merge_weights(model)
    for layer in model.get_decoder().layers:
        attention, mlp = layer.self_attn, layer.mlp
        for group in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
            for attribute in ("weight", "bias"):
                tensors = [getattr(part, attribute) for part in group]
                if tensors[0] is not None:
                    merged = get_merged_view(tensors)
                    assert merged is not None
                    torch.testing.assert_close(merged, torch.cat(list(tensors)))
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    torch.testing.assert_close(model(input_ids=ids).logits, expected)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    merge_weights(model)
    assert pointers == [parameter.data_ptr() for parameter in model.parameters()]
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_every_linear_weight_is_found_once_with_the_ones_it_is_merged_with() -> None:
    model = copy.deepcopy(build_tiny("qwen2"))
    decoder = model.get_decoder()
    linears = [layer.weight for layer in decoder.modules() if type(layer) is torch.nn.Linear]
    assert sorted(map(len, find_merged_tensors(decoder))) == [1] * len(linears)
    merge_weights(model)
    found = find_merged_tensors(decoder)
    assert sorted(map(len, found)) == sorted([3, 2, 1, 1] * len(decoder.layers))
    assert {id(weight) for group in found for weight in group} == {id(weight) for weight in linears}
    assert all(get_merged_view(group) is not None for group in found)


@torch.no_grad()
def test_an_in_place_update_is_visible_in_the_merged_tensor() -> None:
    model = copy.deepcopy(build_tiny("llama"))
    merge_weights(model)
    attention = model.get_decoder().layers[0].self_attn
    weights = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    merged = get_merged_view(weights)
    assert merged is not None
    attention.k_proj.weight.add_(1.0)
    torch.testing.assert_close(merged, torch.cat(weights))
    attention.k_proj.weight.data = attention.k_proj.weight.data.clone()
    assert get_merged_view(weights) is None


def test_merged_groups_are_found_among_other_weights() -> None:
    whole, biases = torch.randn(9, 4), torch.randn(9)
    first, second, third = whole.split([2, 3, 4])
    between = torch.randn(5, 4)
    cases = [
        ([first, between, second, third], [None] * 4, [[0, 2, 3], [1]]),
        ([second, first], [None] * 2, [[0], [1]]),
        ([first, second, third], [biases[:2], biases[2:5], biases[5:]], [[0, 1, 2]]),
        ([first, second], [biases[:2], None], [[0], [1]]),
        ([first, second], [None, biases[:2]], [[0], [1]]),
        ([first, second], [biases[:2], biases[3:6]], [[0], [1]]),
    ]
    for weights, given, expected in cases:
        groups = find_merged_groups(weights, given)
        assert [group.indices for group in groups] == expected
        for group in groups:
            assert torch.equal(group.weight, torch.cat([weights[index] for index in group.indices]))
            present = [bias for bias in (given[index] for index in group.indices) if bias is not None]
            assert group.bias is None if not present else torch.equal(group.bias, torch.cat(present))


@pytest.fixture
def wide_products():
    """Products of 16-bit matrices in float32, which torch has on a GPU only."""
    library = torch.library.Library("aten", "IMPL")

    def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        return a.to(out_dtype) @ b.to(out_dtype)

    def addmm(total: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta=1, alpha=1, out: Tensor) -> Tensor:
        return out.copy_(total + a.to(out_dtype) @ b.to(out_dtype))

    library.impl("mm.dtype", mm, "CPU")
    library.impl("addmm.dtype_out", addmm, "CPU")
    yield
    library._destroy()


def test_gradients_of_merged_weights_are_accumulated_in_one_product(wide_products) -> None:
    whole = torch.randn(9, 4, dtype=torch.bfloat16)
    weights = [torch.nn.Parameter(part) for part in whole.split([2, 3, 4])]
    grad, hidden = torch.randn(5, 9, dtype=torch.bfloat16), torch.randn(5, 4, dtype=torch.bfloat16)
    assert not accumulate_weight_grads(weights, grad, hidden), "gradients have the dtype of the weights"
    for weight in weights:
        weight.grad_dtype = torch.float32
    expected = grad.float().t() @ hidden.float()
    for number in (1, 2):
        assert accumulate_weight_grads(weights, grad, hidden)
        merged = get_merged_view([weight.grad for weight in weights])
        assert merged is not None
        torch.testing.assert_close(merged, number * expected)
    weights[1].grad = None
    assert not accumulate_weight_grads(weights, grad, hidden), "one of them has none yet"
    assert accumulate_weight_grads(weights[1:2], grad[:, 2:5], hidden)
    torch.testing.assert_close(weights[1].grad, expected[2:5])
    assert not accumulate_weight_grads(weights, grad, hidden), "they are no longer merged"
    assert accumulate_weight_grads(weights[:1], grad[:, :2], hidden)
    torch.testing.assert_close(weights[0].grad, 3 * expected[:2])


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_rotary_embeddings_of_three_axes_are_not_read_from_a_table_of_one(name: str) -> None:
    model = build_tiny(name)
    rotary = model.get_decoder().rotary_emb
    hidden, positions = torch.zeros(1, 4, 32), torch.tensor([[[0, 1, 2, 5]]]).expand(3, 1, 4)
    expected = rotary(hidden, positions)
    with FusedLayers(model, build_ops(Counter()), max_positions=32).installed():
        found = rotary(hidden, positions)
    assert all(map(torch.equal, found, expected))
