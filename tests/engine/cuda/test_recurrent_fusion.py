"""Layers of recurrent models are traced whole: one graph of each kind for all layers, sizes and requests."""

from __future__ import annotations

import copy
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from test_fx_passes import CPU, build_ops
from torch import Tensor, fx
from transformers import PreTrainedModel

from tiny_models import build_tiny
from tunesmith.config import LoraSection
from tunesmith.engine.batch.kv_cache import KVCache, build_states
from tunesmith.engine.core.span import Span
from tunesmith.engine.cuda.attention_plans import LayeredPlan, build_decode_plan, build_prefill_plan
from tunesmith.engine.cuda.decode_work import DecodeWork, Divider, Kind
from tunesmith.engine.cuda.layer_fusion import FusedLayers
from tunesmith.engine.worker.model_runner import probe_layers
from tunesmith.model.adapters.lora import add_adapter
from tunesmith.model.forward.attention import run_body, use_plan_attention
from tunesmith.model.forward.recurrence import CONV, MATRIX, Segment, SegmentTable, describe_states
from tunesmith.model.merged_weights import concat_linear_op, merge_weights

EMPTY_SLOT, NUM_SLOTS = 7, 8
ROWS = ((11, 5), (9,), (3, 12, 70))
"""Prompts of the requests of a row."""


def build_table(name: str, states: Tensor, slots: Tensor) -> SegmentTable:
    rows = [Segment(start=row, end=row + 1, source=slot, targets=(slot,)) for row, slot in enumerate(slots.tolist())]
    return SegmentTable(rows, CPU, {0: {name: states}}).select_layer(0)


def step_conv(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, has_silu: bool, states: Tensor, slots: Tensor
) -> Tensor:
    module = SimpleNamespace(weight=weight[:, None], bias=bias)
    return build_table(CONV, states, slots).convolve(inputs, module, has_silu=has_silu)


def step_delta(
    mixed: Tensor, rate: Tensor, step: Tensor, a_log: Tensor, dt_bias: Tensor, _epsilon: float, states: Tensor,
    slots: Tensor,
) -> Tensor:  # fmt: skip
    _, num_heads, size_k, size_v = states.shape
    key_dim = (mixed.shape[1] - num_heads * size_v) // 2
    module = SimpleNamespace(
        A_log=a_log, dt_bias=dt_bias, key_dim=key_dim, value_dim=num_heads * size_v, num_k_heads=key_dim // size_k,
        num_v_heads=num_heads, head_k_dim=size_k, head_v_dim=size_v,
    )  # fmt: skip
    return build_table(MATRIX, states, slots).apply_delta(module, mixed, rate, step)


def step_states(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, states: Tensor, slots: Tensor) -> Tensor:
    return build_table(MATRIX, states, slots).apply_rule(query, key, value, decay)


for function in (step_conv, step_delta, step_states):
    torch.library.impl(f"tunesmith::{function.__name__}", "CPU")(function)


class Requests:
    """Requests of a row: their blocks, slots and tokens, whose last two are decoded."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths
        generator = torch.Generator().manual_seed(0)
        self.ids = [torch.randint(0, 97, (length + 2,), generator=generator) for length in lengths]
        self.blocks = [list(range(20 * index + 1, 20 * index + 20)) for index in range(len(lengths))]

    def prefill(self, model: PreTrainedModel, cache: KVCache) -> Tensor:
        firsts = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        spans = [
            Span(first, 0, length, blocks, source=EMPTY_SLOT, slot=slot)
            for slot, (first, length, blocks) in enumerate(zip(firsts, self.lengths, self.blocks, strict=False))
        ]
        plan = build_prefill_plan(cache, spans, tile_tokens=8, device=CPU)
        row = torch.cat([ids[:length] for ids, length in zip(self.ids, self.lengths, strict=True)])
        return self._run(model, row, torch.cat([torch.arange(length) for length in self.lengths]), plan)

    def decode(self, model: PreTrainedModel, cache: KVCache, step: int) -> Tensor:
        divider = Divider(block_size=4, num_kv_heads=1, num_heads=1, head_size=16, num_sms=1, window=0)
        positions = torch.tensor(self.lengths) + step
        division_7R = torch.zeros((7, len(positions)), dtype=torch.int32)
        work = DecodeWork.allocate(divider, Kind.WHOLE, positions, division_7R)
        table = torch.tensor(self.blocks, dtype=torch.int32)
        plan = build_decode_plan(cache, table, work, torch.arange(len(positions)))
        ids = torch.stack([ids[length + step] for ids, length in zip(self.ids, self.lengths, strict=True)])
        return self._run(model, ids, positions, plan)

    def _run(self, model: PreTrainedModel, ids: Tensor, positions: Tensor, plan: LayeredPlan) -> Tensor:
        return run_body(model, ids[None], positions[None], plan)[0]

    def compute_whole(self, model: PreTrainedModel) -> list[Tensor]:
        """The hidden states of the prefill and of two decode steps, from the modeling code."""
        whole = [model.get_decoder()(input_ids=ids[None]).last_hidden_state[0] for ids in self.ids]
        prefilled = torch.cat([each[:-2] for each in whole])
        return [prefilled, *(torch.stack([each[step - 2] for each in whole]) for step in range(2))]


def build_cache(model: PreTrainedModel) -> KVCache:
    states = build_states(describe_states(model), num_slots=NUM_SLOTS, device=CPU)
    for each in states.values():
        for tensor in each.values():
            tensor[:EMPTY_SLOT].normal_()  # what an earlier request has left
    return KVCache(probe_layers(model), num_blocks=80, block_size=4, dtype=model.dtype, device=CPU, states=states)


@pytest.mark.parametrize(
    ("name", "merged_of_kind"),
    [
        # products of the recurrence's or attention's inputs, and of gate and value
        ("qwen3_5", [[3, 2], [4, 2]]),
        ("qwen3_next", [[2, 2], [3, 2]]),
        ("lfm2", [[2]]),  # only prefills of convolutions: the rest is fused without a compiler
        ("granitemoehybrid", [[], [3]]),
        ("falcon_h1", [[3, 2]]),  # a layer has both
        ("nemotron_h", [[]]),
        ("qwen3_moe", [[3, 3]]),  # of queries, keys and values; the first factors of an adapter beside them
    ],
)
@torch.inference_mode()
def test_all_layers_of_a_kind_share_a_graph_that_serves_every_row(
    name: str, merged_of_kind: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[fx.GraphModule] = []

    def compile_fx(module: fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(module)  # torch's compiler would compile C++ for many seconds
        return module.forward

    monkeypatch.setattr("tunesmith.model.forward.fx_passes.compile_fx", compile_fx)
    monkeypatch.setattr("tunesmith.model.forward.recurrence.get_least_size", lambda device: 2)  # as on a GPU
    torch._dynamo.reset()
    model = copy.deepcopy(build_tiny(name))
    if name == "qwen3_moe":
        add_adapter(model, LoraSection(r=4), base="", dtype=model.dtype)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    use_plan_attention(model)
    merge_weights(model)
    fused = FusedLayers(model, build_ops(Counter()), max_positions=128)
    for lengths in ROWS:
        cache, requests = build_cache(model), Requests(lengths)
        with fused.installed():
            found = [requests.prefill(model, cache)]
            if len(lengths) > 1:  # no decode graph has one row
                found += [requests.decode(model, cache, step) for step in range(2)]
        for ours, theirs in zip(found, requests.compute_whole(model), strict=False):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    for operations in ({"write_states", "paged_prefill"}, {"step_conv", "paged_decode"}):
        kinds = [each for each in graphs if not operations.isdisjoint(list_names(each))]
        is_fused = name == "lfm2" and "step_conv" in operations
        assert sorted(map(list_merged, kinds)) == ([] if is_fused else merged_of_kind), operations


@torch.inference_mode()
def test_a_compiled_chunk_reads_the_state_that_it_replaces() -> None:
    """A prompt that is prefilled in chunks starts from the slot of its request, and ends in it."""
    module = torch.nn.Conv1d(8, 8, 4, groups=8, bias=False)
    inputs, states = torch.randn(5, 8), torch.randn(3, 3, 8)
    segments = [Segment(start=0, end=3, source=1, targets=(1,)), Segment(start=3, end=5, source=0, targets=(2, 0))]
    expected, found = (SegmentTable(segments, CPU, {0: {CONV: states.clone()}}).select_layer(0) for _ in range(2))

    def convolve(inputs: Tensor, table: SegmentTable) -> Tensor:
        return table.convolve(inputs, module, has_silu=True)

    torch._dynamo.reset()
    # as on a GPU, where the context is not copied before it is read by index, and without vectors, for which C++ is
    # compiled to know what the compiler supports, and without headers that are compiled for later programs
    options = {"force_pointwise_cat": True, "cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}
    options["compile_threads"] = 1
    with torch._inductor.config.patch(options):
        output = torch.compile(convolve, fullgraph=True, dynamic=True)(inputs, found)
    torch.testing.assert_close(output, convolve(inputs, expected))
    torch.testing.assert_close(found.layer_states[CONV], expected.layer_states[CONV], atol=0, rtol=0)


def list_names(graph: fx.GraphModule) -> list[str]:
    return [str(node.target).removeprefix("tunesmith.").removesuffix(".default") for node in graph.graph.nodes]


def list_merged(graph: fx.GraphModule) -> list[int]:
    """The number of weights of each merged product."""
    return [len(node.args[1]) for node in graph.graph.nodes if node.target is concat_linear_op]
