"""Reinforcement learning of an adapter, end to end: new, loaded, merged, stopped and resumed."""

from __future__ import annotations

import json

import pytest
from peft import PeftModel
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from small_runs import build_small_run, list_apples, write_splits
from tunesmith import AlgorithmConfig
from tunesmith.errors import ModelError

LORA = "model.lora.r=4"
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def run(tmp_path, pocket_folder):
    data = write_splits(tmp_path / "data", list_apples(6))
    algorithm = AlgorithmConfig(group_size=4, batch_size=2, learning_rate=1e-2)

    def call(*overrides, path=pocket_folder, name="x", steps=2):
        start = build_small_run(
            tmp_path, str(path), data, "monitor.trackers=[]", steps=steps, max_tokens=6, algorithm=algorithm,
            experiment_name=name,
        )  # fmt: skip
        return start(*overrides)

    return call


def read_metrics(result):
    return [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]


def test_an_adapter_is_sampled_trained_and_saved_without_merging(run, pocket_folder):
    result = run(LORA, "algorithm.kl_coef=0.1")
    first, second = read_metrics(result)
    assert first["train/grad_norm"] > 0
    assert first["train/kl"] == pytest.approx(0, abs=1e-6)
    assert second["train/kl"] > 1e-5
    assert max(row["mismatch/max_log_ratio"] for row in (first, second)) < 1e-4
    names = {path.name for path in result.checkpoint.iterdir()}
    assert WEIGHTS in names
    assert "model.safetensors" not in names
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(pocket_folder), result.checkpoint)


def test_a_stopped_adapter_run_resumes_to_the_same_metrics(run):
    whole = run(LORA, name="whole", steps=3)
    run(LORA, name="parts", steps=2)
    parts = run(LORA, "continue_from_checkpoint=true", name="parts", steps=3)

    def numbers(result):
        return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in read_metrics(result)]

    assert numbers(whole) == numbers(parts)
    one, other = (load_file(result.checkpoint / WEIGHTS) for result in (whole, parts))
    assert all((one[name] == other[name]).all() for name in one)


def test_an_adapter_has_its_own_learning_rate_and_a_resumed_run_keeps_the_one_it_began_with(tmp_path, pocket_folder):
    data = write_splits(tmp_path / "data", list_apples(6))
    algorithm = AlgorithmConfig(group_size=4, batch_size=2)
    start = build_small_run(tmp_path, pocket_folder, data, LORA, "monitor.trackers=[]", steps=1, algorithm=algorithm)
    assert start("name=new").metrics["train/learning_rate"] == 2e-5
    before = start("name=old", "trainer.learning_rate=1e-6")
    resumed = start("name=old", "total_steps=2", continue_from_checkpoint=True)
    assert resumed.folder == before.folder and resumed.metrics["train/learning_rate"] == 1e-6
    assert "learning_rate: 1.0e-06" in (before.folder / "config.yaml").read_text()


def test_training_continues_from_an_adapter_or_from_its_merged_weights(run):
    start = run(LORA, name="start").checkpoint
    again = run("model.lora={}", path=start, name="again", steps=1).checkpoint
    before, after = load_file(start / WEIGHTS), load_file(again / WEIGHTS)
    assert before.keys() == after.keys()
    assert {name: value.shape for name, value in before.items()} == {name: v.shape for name, v in after.items()}
    assert any((before[name] != after[name]).any() for name in before)
    merged = run(path=start, name="merged", steps=1).checkpoint
    AutoModelForCausalLM.from_pretrained(merged)
    assert (merged / "model.safetensors").is_file()
    with pytest.raises(ModelError, match=r"model\.lora\.r=8, but the adapter .* has 4"):
        run("model.lora.r=8", path=start, name="other")
