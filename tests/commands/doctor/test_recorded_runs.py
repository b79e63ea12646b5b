"""No false alarm on recorded runs that learned, and the known weaknesses of those that did not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tunesmith.commands.doctor.diagnose import diagnose

RESULTS = Path(__file__).parents[3] / "results" / "runs"
RUNS = {
    "demo_run/metrics.jsonl": "demo_run/config.yaml",
    "gsm8k_grpo_gpu/metrics_grpo.jsonl": "gsm8k_grpo_gpu/grpo.yaml",
    "gsm8k_grpo_gpu/metrics_sft.jsonl": "gsm8k_grpo_gpu/sft.yaml",
    "gsm8k_bots_gpu/metrics_bots.jsonl": "gsm8k_bots_gpu/rl.yaml",
    "gsm8k_bots_gpu/metrics_random.jsonl": "gsm8k_bots_gpu/rl.yaml",
    "gsm8k_gpu/metrics.jsonl": "gsm8k_gpu/config.yaml",
    "gsm8k_cpu/metrics.jsonl": "gsm8k_cpu/config.yaml",
}


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Diagnoses a recorded run."""
    for name in ("OUTDIR", "SFT", "DATA", "BASE", "EVALDATA"):
        monkeypatch.setenv(name, "1")

    def call(metrics):
        shutil.copy(RESULTS / metrics, tmp_path / "metrics.jsonl")
        settings = (RESULTS / RUNS[metrics]).read_text()
        # a run without held-out rows, whose file has a key that was accepted then
        (tmp_path / "config.yaml").write_text(settings.replace("evaluation_interval_steps: 0\n", ""))
        return diagnose(tmp_path)

    return call


def test_the_only_note_on_the_demo_is_that_its_tasks_are_solved(load, tmp_path):
    (tmp_path / "last_commit.json").write_text('{"step": 40}')
    (note,) = load("demo_run/metrics.jsonl").findings
    assert (note.check, note.severity) == ("equal-rewards", "note")
    assert "all rollouts get the highest reward" in note.problem


@pytest.mark.parametrize("metrics", [name for name in RUNS if "grpo_gpu" in name or "bots_gpu" in name])
def test_runs_that_learned_give_no_alarm(load, metrics):
    diagnosis = load(metrics)
    assert [each for each in diagnosis.findings if each.severity != "note"] == []
    assert {each.check for each in diagnosis.passed} >= {"learning-rate"}


@pytest.mark.parametrize("metrics", ["gsm8k_gpu/metrics.jsonl", "gsm8k_cpu/metrics.jsonl"])
def test_runs_of_a_model_that_cannot_solve_the_tasks_are_recognized(load, metrics):
    findings = {each.check: each for each in load(metrics).findings}
    assert "too hard" in findings["equal-rewards"].problem
    assert findings["truncation"].settings
