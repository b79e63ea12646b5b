"""Fine-tuning runs made to fail: a dead or destructive learning rate, overfitting; and a healthy one."""

from __future__ import annotations

import json
import shutil

import pytest

from tunesmith.commands.doctor.diagnose import diagnose
from tunesmith.commands.sft.train import run_offline
from tunesmith.config import ConversationDataSection, ModelSection, MonitorSection, SftConfig, SftTrainerSection
from tunesmith.storage import save_json


@pytest.fixture
def finetune(tmp_path, pocket_folder):
    """Fine-tunes on copies of `rows`, by default a pattern that is easy to learn; returns the diagnosis."""

    def call(*, rate, rows=None, num_epochs=2, **settings):
        rows = [("How many apples?", "Three apples.")] * 24 if rows is None else rows
        messages = [[{"role": "user", "content": each[0]}, {"role": "assistant", "content": each[1]}] for each in rows]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages))
        config = SftConfig(
            model=ModelSection(path=pocket_folder, device="cpu", max_model_len=128),
            train_dataset=ConversationDataSection(path=str(tmp_path / "rows.jsonl")),
            max_rows_per_batch=4,
            num_epochs=num_epochs,
            trainer=SftTrainerSection(learning_rate=rate, schedule="constant"),
            monitor=MonitorSection(trackers=(), has_progress=False, log_interval_steps=1000),
            **settings,
        )
        return diagnose(run_offline(config, out_dir=tmp_path / "sft").folder)

    return call


def test_a_healthy_fine_tuning_has_no_finding(finetune):
    diagnosis = finetune(rate=3e-3)
    assert diagnosis.findings == () and diagnosis.state == "finished"
    assert {each.check for each in diagnosis.passed} == {"stopped", "learning-rate", "loss"}


def test_a_stopped_fine_tuning_is_repeated_without_options_that_it_has_not(finetune, tmp_path):
    finetune(rate=3e-3)
    shutil.rmtree(tmp_path / "sft/model")
    (found,) = diagnose(tmp_path / "sft").findings
    assert found.change.startswith("repeat the command; if") and "kv_cache" not in found.change and not found.settings
    save_json(tmp_path / "sft/error.json", {"step": 2, "error": "StorageError", "message": "no space"})
    (found,) = diagnose(tmp_path / "sft").findings
    assert found.problem == "the run failed at step 2 with a StorageError"
    assert found.change == "change what the message names, then repeat the command"


def test_a_dead_learning_rate(finetune):
    diagnosis = finetune(rate=1e-11)
    names = {each.check: each for each in diagnosis.findings}
    assert names["learning-rate"].severity == "error"
    assert "hardly falls" in names["loss"].problem


def test_a_destructive_learning_rate(finetune):
    rows = [(f"How many apples has {n}?", f"{n * 7919 % 1000} apples, {n * 31 % 97}.") for n in range(48)]
    assert "loss" in {each.check for each in finetune(rate=1.0, rows=rows).findings}
