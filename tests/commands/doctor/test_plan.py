"""Whether a run fits a card, before it starts."""

from __future__ import annotations

import copy

import pytest

from benchmarks.shared.shapes import SHAPES
from tunesmith import doctor
from tunesmith.errors import ConfigError
from tunesmith.model.memory import GIB


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The configuration of a model of 0.6e9 parameters, without weights."""
    folder = tmp_path_factory.mktemp("model") / "qwen3-0.6b"
    copy.deepcopy(SHAPES["qwen3-0.6b"]).save_pretrained(folder)
    return folder


def test_a_run_file_is_planned_for_a_card_and_the_mildest_change_that_fits_is_named(model, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{path: {model}, max_model_len: 2048}}\n")
    plan = doctor(plan=path, memory_gib=12)
    sums = {name: run.num_bytes / GIB for name, run in plan.runs.items()}
    assert sums["LoRA, ckpt"] < sums["LoRA"] <= 12 < sums["checkpoints"] <= sums["as it is"]
    assert "fits with --set model.lora={}" in str(plan)
    assert plan.to_json()["fitting"][0] == "LoRA"
    assert max(map(len, str(plan).splitlines()[1:])) <= 80  # the first line names the model
    roomy = doctor(plan=path, memory_gib=140)
    assert str(roomy).endswith("fits as it is")
    assert roomy.runs["as it is"].row_tokens == 16384 > plan.runs["as it is"].row_tokens
    assert "a smaller model" in str(doctor(plan=path, memory_gib=2))


def test_a_model_alone_is_planned_with_the_defaults_and_overrides_change_them(model):
    plan = doctor(plan=model, memory_gib=24, overrides=["engine.kv_cache_gib=3", "algorithm.kl_coef=0.1"])
    parts = plan.runs["as it is"].parts
    assert parts["KV cache"] / GIB == pytest.approx(3, rel=0.01)
    assert parts["reference"] == parts["weights"]
    assert "reference" not in plan.runs["LoRA"].parts  # the base under the adapter is the reference


def test_a_run_with_its_own_loss_is_planned(model):
    overrides = ["algorithm.loss=tunesmith.algorithms.losses.policy:compute_sft_losses"]
    assert doctor(plan=model, memory_gib=24, overrides=overrides).runs["as it is"].parts


def test_a_folder_and_a_plan_exclude_each_other(model):
    with pytest.raises(ConfigError, match="either the folder of a run, or plan"):
        doctor(plan=model, run=model)
    with pytest.raises(ConfigError, match="no effect without plan"):
        doctor(model, memory_gib=3)
