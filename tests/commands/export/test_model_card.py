"""Model cards contain the data and figures of the run, and nothing that is unknown."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

from exported_models import CONFIGS, build_random_model, build_tokenizer, save_tiny
from tunesmith.commands.eval.results import compute_evaluation
from tunesmith.commands.export.model_card import describe_method
from tunesmith.commands.export.run import run_export
from tunesmith.config import ExportSection, LoraSection, PreferenceConfig, RunConfig, SftConfig
from tunesmith.model.checkpoint import save_checkpoint
from tunesmith.model.load import load_model
from tunesmith.monitor.metrics_file import append_metrics
from tunesmith.runs.load_config import build_section, dump_config
from tunesmith.runs.record import RunRecord
from tunesmith.storage import save_json
from tunesmith.types import Group, Task, Trajectory


def save_run(root: Path) -> None:
    """A run of three steps with an evaluation before it and after each."""
    values = {
        "model": {"path": "Qwen/Qwen2.5-0.5B-Instruct"},
        "train_dataset": {"path": "/home/ada/data/gsm8k", "split": "train"},
        "algorithm": {"algorithm_type": "grpo", "group_size": 8, "batch_size": 4},
        "trainer": {"learning_rate": 3e-6},
        "seed": 5,
    }
    root.mkdir()
    (root / "config.yaml").write_text(dump_config(build_section(RunConfig, values)), encoding="utf-8")
    metrics = partial(append_metrics, root / "metrics.jsonl")
    for step in range(1, 4):
        metrics(step, "train", {"rollout/reward_mean": step / 8, "train/loss": 0.5, "perf/step_s": 9.0})
    for step in range(4):
        save_json(root / "eval" / f"step_{step:06d}.json", {"test": evaluate(num_right=step).to_json()})
    for step in (2, 3):
        model, tokenizer = build_random_model(CONFIGS["qwen2"]), build_tokenizer("qwen2")
        save_checkpoint(root / f"global_step_{step}", model, tokenizer, trainer_state={}, run_state={})


def evaluate(*, num_right: int):
    """An evaluation on four tasks."""
    tasks = [Task(task_id=f"test/{index}", index=index, row={}) for index in range(4)]
    groups = [
        Group(task=task, trajectories=(Trajectory(task=task, run_index=0, turns=(), reward=float(index < num_right)),))
        for index, task in enumerate(tasks)
    ]
    return compute_evaluation("test", groups, policy_version=0)


def read_card(path: Path) -> tuple[dict, str]:
    """Front matter and text."""
    _, front, text = path.read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), text


def test_the_card_of_a_checkpoint_describes_its_run(tmp_path):
    save_run(tmp_path / "solver")
    settings = ExportSection(path=str(tmp_path / "solver" / "global_step_2"), license="apache-2.0")
    report = run_export(settings, out_dir=tmp_path / "out")
    front, text = read_card(report.hf / "README.md")
    assert front == {
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["tunesmith", "qwen2"],
        "base_model": "Qwen/Qwen2.5-0.5B-Instruct",
    }
    assert (
        "# solver\n" in text and "Trained by reinforcement learning (grpo). These are the weights after step 2." in text
    )
    assert "| data | gsm8k (train) |" in text and "/home/ada" not in text
    assert "| algorithm.group_size | 8 |" in text and "| trainer.learning_rate | 3e-06 |" in text
    assert "| rollout/reward_mean | 0.125 | 0.25 |" in text
    low, high = json.loads((tmp_path / "solver" / "eval" / "step_000002.json").read_text())["test"]["interval_95"]
    assert f"| 2 | test | 4 | 0.5 | {low:.4g} to {high:.4g} |" in text
    assert "| 3 | test" not in text and "perf/step_s" not in text
    assert f"the same logits as the source, bit for bit on {report.checks['hf']['num_tokens']:.0f} tokens" in text


def test_the_card_of_a_fine_tuned_model_has_its_losses(tmp_path):
    root = tmp_path / "sft-run"
    values = {
        "model": {"path": "/models/base", "lora": {"r": 8}},
        "train_dataset": {"path": ["/data/a.jsonl", "/data/b.jsonl"], "split": None},
        "num_epochs": 3,
    }
    save_tiny("smollm", root / "model")
    (root / "config.yaml").write_text(dump_config(build_section(SftConfig, values)), encoding="utf-8")
    metrics = partial(append_metrics, root / "metrics.jsonl")
    metrics(1, "train", {"train/loss": 2.0})
    metrics(1, "eval", {"eval/loss": 1.25})
    metrics(2, "train", {"train/loss": 1.0})
    metrics(2, "eval", {"eval/loss": 1.5})
    files = {path.name: path.stat().st_size for path in (root / "model").iterdir()}
    save_json(root / "model" / "DONE.json", {"step": 1, "files": files, "figures": {}})
    _, text = read_card(run_export(ExportSection(path=str(root)), out_dir=tmp_path / "out").hf / "README.md")
    assert "# sft-run\n" in text and "Trained by supervised fine-tuning. These are the weights after step 1." in text
    assert "from base, exported" in text and "| data | a.jsonl, b.jsonl |" in text and "| model.lora.r | 8 |" in text
    assert "| 1 | 1.25 |" in text and "1.5" not in text


def test_the_card_of_an_adapter_has_the_adapters_own_settings(tmp_path):
    root, base = tmp_path / "run", save_tiny("smollm", tmp_path / "base")
    lora = LoraSection(r=4, alpha=12.0, target_modules=("v_proj", "q_proj"))
    live = load_model(str(base), dtype=torch.float32, device=torch.device("cpu"), lora=lora)
    save_checkpoint(root / "global_step_1", live, build_tokenizer("smollm"), trainer_state={}, run_state={})
    values = {"model": {"path": str(tmp_path / "sft"), "lora": {}}, "train_dataset": {"path": "data"}}
    (root / "config.yaml").write_text(dump_config(build_section(RunConfig, values)), encoding="utf-8")
    _, text = read_card(run_export(ExportSection(path=str(root)), out_dir=tmp_path / "out").hf / "README.md")
    assert "| model.lora.r | 4 |" in text and "| model.lora.alpha | 12.0 |" in text
    assert "| model.lora.target_modules | q_proj, v_proj |" in text


def test_the_card_of_a_model_without_a_run_states_that_its_training_is_unknown(tmp_path):
    folder = save_tiny("smollm", tmp_path / "found-somewhere")
    report = run_export(ExportSection(path=str(folder), has_verification=False), out_dir=tmp_path / "out")
    front, text = read_card(report.hf / "README.md")
    assert front["license"] == "unknown" and "base_model" not in front
    assert "How the model was trained is unknown." in text and "Not stated." in text
    assert "Comparison with the source" not in text


def test_the_card_of_gguf_files_has_the_divergence_of_each_type(tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    folder = save_tiny("qwen3", tmp_path / "tiny")
    settings = ExportSection(path=str(folder), formats=("gguf",), gguf_types=("f16", "q8_0"))
    report = run_export(settings, out_dir=tmp_path / "out")
    front, text = read_card(tmp_path / "out" / "gguf" / "README.md")
    assert front["library_name"] == "gguf" and "llama-cli -m tiny-f16.gguf" in text
    figures = report.checks["gguf/tiny-q8_0.gguf"]
    assert f"| tiny-q8_0.gguf | {figures['kl_mean']:.4g} | {figures['kl_max']:.4g} |" in text


@pytest.mark.parametrize(
    ("config", "method"),
    [
        (RunConfig(model={"path": "m"}), "reinforcement learning (multi_step_grpo)"),
        (
            SftConfig(model={"path": "m"}, train_dataset={"path": "d"}, trainer={"learning_rate": 1e-5}),
            "supervised fine-tuning",
        ),
        (
            PreferenceConfig(model={"path": "m"}, train_dataset={"path": "d"}, algorithm_type="kto"),
            "preference optimization (kto)",
        ),
    ],
)
def test_the_method_is_that_of_the_kind_of_run(tmp_path, config, method):
    (tmp_path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    assert describe_method(RunRecord(tmp_path)) == method
