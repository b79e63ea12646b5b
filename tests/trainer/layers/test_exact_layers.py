"""Layers in the sampler's operations (`model.numerics=exact`) have the gradients of the modeling code.

Equal bits of sampler and trainer are tested in `tests/gpu/test_exact_gpu.py`. Here the kernels run on a GPU, or in
Triton's interpreter where Triton is installed without one.
"""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton")

from torch._dynamo.utils import counters

from trainable_models import build_trainable
from tunesmith.config import LoraSection, TrainerSection
from tunesmith.experience.samples import Trie, build_trie, concatenate_tries
from tunesmith.model.forward import fx_passes
from tunesmith.model.forward.attention import run_body
from tunesmith.model.kernels import paged_prefill, span_attention
from tunesmith.model.merged_weights import get_merged_view, merge_weights
from tunesmith.trainer.layers import compiled_layers as compiling
from tunesmith.trainer.layers.gradient_checkpointing import checkpointed_layers, enable_checkpointing
from tunesmith.trainer.optimizer import MasterAdamW
from tunesmith.trainer.tree_attention.kernels.exact_attention import build_spans, count_padding
from tunesmith.trainer.tree_attention.plan import TreePlan, exact_attention
from tunesmith.trainer.tree_attention.tile_schedule import TILINGS, build_table, choose_tiling, pad_trie
from tunesmith.types import Sample

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS = (2, 16)
WIDE = choose_tiling(HEADS[1], is_wide=True)


class ExactPlan:
    """A row's attention in the sampler's order, on any device."""

    def __init__(self, trie: Trie, windows: tuple[int | None, ...]) -> None:
        self.spans = build_spans(trie, HEADS, DEVICE)
        self.tables = {each: torch.from_numpy(build_table(trie, each, TILINGS[WIDE])).to(DEVICE) for each in windows}

    def attend(self, module, query, key, value, options):
        window = options.sliding_window
        sizes = (WIDE, window or 0, options.get_scaling(query.shape[-1]), options.softcap or 0.0)
        return exact_attention(query, key, value, *self.spans, self.tables[window], *sizes)


def build_row(kind: str) -> Trie:
    """Three packed sequences, or the trie of answers to one prompt; a last token attends to itself only."""
    lengths, prompt = (7, 9, 13), 0 if kind == "packed" else 5
    samples = []
    for index, length in enumerate(lengths):
        ids = tuple(range(prompt)) + tuple((7 * index + 3 * each) % 97 for each in range(length - prompt))
        samples.append(
            Sample(
                token_ids=ids, is_sampled=(False,) * (length - 1) + (True,), logprobs=(0.0,) * length,
                advantages=(0.0,) * length, policy_versions=(None,) * length, distribution_spans=(), group_index=0,
                trajectory_index=index,
            )
        )  # fmt: skip
    parts = [[0], [1], [2]] if kind == "packed" else [[0, 1, 2]]
    return pad_trie(concatenate_tries([build_trie(samples, part) for part in parts]), TILINGS[WIDE].forward.rows)


@pytest.fixture
def exact(monkeypatch):
    torch._dynamo.reset()
    counters.clear()
    compiling.fuse_function.cache_clear()
    for module in (compiling, fx_passes, span_attention, paged_prefill):
        monkeypatch.setattr(module, "is_exact", lambda: True)


def compute_gradients(model, trie, plan) -> dict[str, torch.Tensor]:
    """The last hidden states, and the gradient of each trained parameter."""
    ids, depths = (torch.from_numpy(each)[None].to(model.device) for each in (trie.token_ids_T, trie.depth_T))
    hidden = run_body(model, ids, depths, plan)[:, : trie.num_tokens - count_padding(trie)]
    weights = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype, device=hidden.device).view_as(hidden)
    (hidden * weights.sin()).sum().backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {"hidden": hidden.detach(), **found}


@pytest.mark.parametrize("kind", ["packed", "trie"])
def test_padding_is_one_span_whatever_its_length(kind):
    """Each span has a row of the block table, as wide as the longest path: long rows are padded by thousands."""
    trie = build_row(kind)
    longer = pad_trie(trie, 1024)
    few, many = (build_spans(each, HEADS, torch.device("cpu")) for each in (trie, longer))
    assert count_padding(longer) - count_padding(trie) == longer.num_tokens - trie.num_tokens
    assert few[0].shape[0] == many[0].shape[0]
    num_real, num_spans = trie.num_tokens - count_padding(trie), int((many[1][2] > 0).sum())
    assert many[1][:, num_spans - 1].tolist() == [num_real, 0, longer.num_tokens - num_real]
    assert torch.equal(few[1][:, : num_spans - 1], many[1][:, : num_spans - 1])


def build_model(name: str, weights: str):
    model = build_trainable(name, dtype=torch.float32, num_layers=2)
    if weights == "lora":
        from tunesmith.model.adapters.lora import add_adapter  # PEFT takes seconds to import

        add_adapter(model.requires_grad_(False), LoraSection(r=4), base="", dtype=torch.float32)
        torch.manual_seed(0)
        for parameter in (each for each in model.parameters() if each.requires_grad):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize(
    ("row", "weights", "has_checkpointing"),
    [("packed", "all", False), ("trie", "all", True), ("packed", "lora", True), ("trie", "lora", False)],
)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gemma3"])
def test_gradients_are_those_of_the_modeling_code(exact, name, row, weights, has_checkpointing):
    model, trie = build_model(name, weights), build_row(row)
    expected = compute_gradients(copy.deepcopy(model).double(), trie, TreePlan(trie, torch.device("cpu")))
    merge_weights(model.to(DEVICE))
    windows = (None, getattr(model.config, "sliding_window", None))
    checkpoint = checkpointed_layers if has_checkpointing else lambda _: nullcontext()
    if has_checkpointing:
        enable_checkpointing(model)
    with compiling.compiled_layers(model), checkpoint(model):
        found = compute_gradients(model, trie, ExactPlan(trie, windows))
    assert found.keys() == expected.keys() and not counters["graph_break"]
    for key, value in expected.items():
        assert (found[key].cpu() - value).norm() <= 1e-4 * value.norm(), key


@pytest.mark.skipif(DEVICE.type == "cpu", reason="16-bit products with a float32 result need a GPU")
def test_gradients_of_16_bit_weights_are_accumulated_in_float32(exact):
    model, trie = build_trainable("qwen3", dtype=torch.bfloat16, num_layers=2), build_row("trie")
    expected = compute_gradients(copy.deepcopy(model).double(), trie, TreePlan(trie, torch.device("cpu")))
    merge_weights(model.to(DEVICE))
    MasterAdamW(model, TrainerSection())
    with compiling.compiled_layers(model):
        for _ in range(2):
            found = compute_gradients(model, trie, ExactPlan(trie, (None,)))
    del expected["hidden"]
    for key, value in expected.items():
        assert found[key].dtype == torch.float32, key
        assert (found[key].cpu() - 2 * value).norm() <= 6e-2 * value.norm(), key
    layer = model.get_decoder().layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    for group in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
        assert get_merged_view([each.weight.grad for each in group]) is not None
