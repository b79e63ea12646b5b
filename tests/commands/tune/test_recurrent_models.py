"""Runs on models with recurrent layers, from a folder to an export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from small_runs import build_small_run, list_apples, write_splits
from tiny_models import get_config
from tunesmith.commands.export.run import run_export
from tunesmith.config import EngineSection, ExportSection, ModelSection
from tunesmith.errors import ConfigError
from tunesmith.model.pocket import build_pocket_tokenizer
from tunesmith.runs.policy import check_engine

IDS = torch.arange(30)[None] * 7 % 97


def write_model(name: str, folder: Path) -> Path:
    tokenizer = build_pocket_tokenizer()
    tokenizer.save_pretrained(folder)
    config = get_config(name)
    config.vocab_size, config.eos_token_id = len(tokenizer), tokenizer.eos_token_id
    config.max_position_embeddings = 512
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def read_kl(folder: Path) -> list[float]:
    return [json.loads(line)["mismatch/kl"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("lora", [[], ["model.lora.r=4"]])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_two_steps_sample_and_train_the_same_policy(name, lora, tmp_path):
    run = build_small_run(tmp_path, str(write_model(name, tmp_path / "model")), write_splits(tmp_path, list_apples(4)))
    result = run(*lora)
    assert max(map(abs, read_kl(result.folder))) < 1e-10
    assert result.metrics["train/grad_norm"] > 0
    report = run_export(ExportSection(path=str(result.checkpoint)), out_dir=tmp_path / "out")
    exported, start = (AutoModelForCausalLM.from_pretrained(each) for each in (report.hf, tmp_path / "model"))
    assert not torch.equal(exported(IDS).logits, start(IDS).logits)
    if not lora:
        trained = AutoModelForCausalLM.from_pretrained(result.checkpoint)
        assert torch.equal(exported(IDS).logits, trained(IDS).logits)


@pytest.mark.parametrize("knob", [{"weight_format": "fp8"}, {"kind": "vllm"}, {"max_speculating_seqs": 4}])
def test_engines_without_states_are_refused(knob, tmp_path):
    model = ModelSection(path=str(write_model("lfm2", tmp_path / "model")))
    with pytest.raises(ConfigError, match=f"engine.{next(iter(knob))}=.* models of type 'lfm2', which have recurrent"):
        check_engine(EngineSection(**knob), model)
