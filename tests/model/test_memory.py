"""The memory that is estimated before a run, against the peaks of GPU runs in `results/` and sums worked by hand."""

from __future__ import annotations

import copy
import functools
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.shared.shapes import SHAPES
from tiny_models import build_tiny
from tunesmith.config import ClusterSection, EngineSection, LoraSection, TrainerSection
from tunesmith.model.adapters.lora import add_adapter
from tunesmith.model.memory import GIB, Card, MemorySettings, count_token_bytes, estimate_memory, fit_rows

RESULTS = Path(__file__).parents[2] / "results"
H200 = Card(type="cuda", num_bytes=int(139.8 * GIB))
TOLERANCE = 0.05
"""The estimates were within 4 % of every measured peak."""


@functools.cache
def build(shape: str, r: int = 0, dtype: torch.dtype = torch.bfloat16):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(SHAPES[shape]), dtype=dtype)
    model.requires_grad_(not r)
    if r:
        add_adapter(model, LoraSection(r=r), base=shape, dtype=dtype)
    return model


def settle(row_tokens: int, **others) -> MemorySettings:
    values = {"lora": None, "engine": None, "max_model_len": 1024, "num_tokens": 10**6} | others
    knobs = {"has_gradient_checkpointing": values.pop("has_checkpointing", False)}
    return MemorySettings(trainer=TrainerSection(max_tokens_per_row=row_tokens, **knobs), **values)


def measure(parts) -> float:
    """Bytes that torch's allocator counts."""
    return sum(parts.values()) - parts["libraries"]


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen2.5-1.5b", "qwen2.5-7b"])
def test_training_with_rollouts_takes_what_runs_on_one_and_two_gpus_took(name):
    record = json.loads((RESULTS / f"ranks/ranks_cuda/{name}.json").read_text())
    given = record["arguments"]
    engine = EngineSection(max_num_seqs=given["tasks"] * given["group"], kv_cache_gib=given["kv_cache_gib"])
    for result in record["results"]:
        settings = settle(
            given["max_tokens_per_row"], engine=engine, num_ranks=result["num_ranks"],
            has_checkpointing=given["checkpointing"],
        )  # fmt: skip
        parts = estimate_memory(build(name), settings, H200)
        peak = max(rank["memory_gib"] for rank in result["ranks"])
        assert measure(parts) / GIB == pytest.approx(peak, rel=TOLERANCE)


def test_an_update_alone_takes_what_steps_of_all_weights_and_of_an_adapter_took():
    text = (RESULTS / "training/train_cuda/second_pass.txt").read_text()
    found = re.findall(r"^== (\S+) \S+ lora=(\S+(?: \d+\})?): rows \[(\d+).*peak ([\d.]+) GB", text, re.MULTILINE)
    assert len(found) == 9
    for name, lora, row, peak in found:
        section = None if lora == "None" else LoraSection(r=16)
        parts = estimate_memory(build(name, r=16 if section else 0), settle(int(row), lora=section), H200)
        assert measure(parts) / 1e9 == pytest.approx(float(peak), rel=TOLERANCE)


def test_recurrent_states_are_counted_beside_the_layers_that_attend():
    """24 layers have 32 matrices of 128 x 128 in float32 and the last 3 of 8,192 inputs in bfloat16; 8 attend."""
    state_bytes = 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    engine = EngineSection(max_num_seqs=64, kv_cache_tokens=16_000)
    parts = estimate_memory(build("qwen3.5-9b", 16), settle(1024, engine=engine), H200)
    assert parts["recurrent states"] == (64 + 2 + 64) * state_bytes
    assert parts["KV cache"] == 16_000 * 8 * 2 * 4 * 256 * 2
    without = EngineSection(max_num_seqs=64, has_prefix_cache=False)
    parts = estimate_memory(build("qwen3.5-9b", 16), settle(1024, engine=without), H200)
    assert parts["recurrent states"] == (64 + 2) * state_bytes


def test_weights_gradients_and_adamw_are_counted_as_the_trainer_holds_them():
    model = build("smollm2-135m")
    num = model.num_parameters()
    parts = estimate_memory(model, settle(1024, num_ranks=2, cluster=ClusterSection()), H200)
    assert parts["weights"] == 2 * num
    assert parts["gradients"] == 4 * num  # less than a tenth of the GPU: each rank has all of them
    assert parts["AdamW"] == 12 * num // 2
    sharded = settle(1024, num_ranks=2, cluster=ClusterSection(has_sharded_gradients=True))
    ends = 49152 * 576
    assert estimate_memory(model, sharded, H200)["gradients"] == 4 * (ends + (num - ends) // 2)
    wide = estimate_memory(build("smollm2-135m", dtype=torch.float32), settle(1024), H200)
    assert (wide["weights"], wide["gradients"], wide["AdamW"]) == (4 * num, 4 * num, 8 * num)


def test_checkpointing_saves_inputs_of_layers_and_on_a_gpu_outputs_of_attention():
    """Each of 28 layers saves 1,024 values a token and 16 heads of 128; one layer at a time has all of its own."""
    layer = 4 * 1024 + 2 * 2048 + 2 * 1024 + 3 * 3072 + 2048 + 1024
    short, long = (
        estimate_memory(build("qwen3-0.6b"), settle(row, has_checkpointing=True), H200)["activations"]
        for row in (4096, 8192)
    )
    assert long - short == 4096 * 2 * (28 * (1024 + 16 * 128) + layer)


def test_four_bits_shrink_the_layers_but_not_embeddings_and_head():
    model = build("qwen2.5-7b", r=16)
    nf4 = LoraSection(r=16, quantization="nf4")
    whole = estimate_memory(model, settle(1024, lora=LoraSection(r=16)), H200)["weights"]
    small = estimate_memory(model, settle(1024, lora=nf4), H200)["weights"]
    layers = 28 * (3584 * (2 * 3584 + 2 * 512) + 3 * 3584 * 18944)
    assert whole - small == pytest.approx(layers * (2 - 0.516), rel=1e-4)


def test_the_kv_cache_is_sized_as_the_engine_sizes_it():
    parts = estimate_memory(build("qwen3-0.6b"), settle(1024, engine=EngineSection(kv_cache_tokens=1000)), H200)
    assert parts["KV cache"] == 1008 * 2 * 28 * 8 * 128 * 2  # whole blocks of 16
    vllm = EngineSection(kind="vllm")
    assert estimate_memory(build("qwen3-0.6b"), settle(1024, engine=vllm), H200)["vLLM"] == int(0.4 * H200.num_bytes)


def test_rows_are_halved_until_they_fit_the_gpu_unless_their_size_is_set():
    model, card = build("qwen3-0.6b"), Card(type="cuda", num_bytes=24 * GIB)
    default = MemorySettings(trainer=TrainerSection(), lora=None, engine=None, max_model_len=1024, num_tokens=10**6)
    fitting = fit_rows(model, default, card)
    assert fitting.trainer.max_tokens_per_row == 8192
    assert sum(estimate_memory(model, fitting, card).values()) < card.num_bytes
    assert fit_rows(model, default, H200) is default
    assert fit_rows(model, settle(16384), card).trainer.max_tokens_per_row == 16384
    assert fit_rows(model, default, Card(type="cpu", num_bytes=GIB)) is default
    tiny = Card(type="cuda", num_bytes=4 * GIB)
    assert fit_rows(model, default, tiny).trainer.max_tokens_per_row == 1024


def test_keys_and_values_of_layers_with_sizes_of_their_own_are_summed():
    """One layer of two heads of 16, two of one head of 24; query heads of the widest layer count for activations."""
    model = build_tiny("gemma4")
    assert count_token_bytes(model.config) == 2 * (2 * 16 + 2 * 24)
    assert estimate_memory(model, settle(100, engine=EngineSection()), H200)["KV cache"] > 0
