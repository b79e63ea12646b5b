"""Folders that earlier versions wrote open and resume: of each command, one that was killed or has finished.

They were written by `write_kept_folders.py`. Files name the folder that they were written in, so they are copied there.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tunesmith.cli import app
from tunesmith.experience.store import load_rollouts
from tunesmith.monitor.metrics_file import load_metrics
from tunesmith.retrieval import SearchIndex

KEPT = Path(__file__).parent / "kept_folders"
FOLDER = Path("/tmp/tunesmith-kept-folders")


@pytest.fixture
def kept(monkeypatch):
    """A copy of the folders, in the place that they were written in, for one test at a time."""
    with Path(f"{FOLDER}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(FOLDER, ignore_errors=True)
        shutil.copytree(KEPT, FOLDER)
        monkeypatch.chdir(FOLDER)
        yield FOLDER
        shutil.rmtree(FOLDER)
    sys.modules.pop("agent", None)


def run(*arguments, expected_status=0):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == expected_status, result.output
    return result.output


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_killed_run_resumes_from_its_checkpoint(kept):
    folder = kept / "runs/AgentScope/killed"
    committed = [row for row in load_metrics(folder / "metrics.jsonl") if row["step"] <= 2]
    turns = [
        [each.turns for each in group.trajectories] for group in load_rollouts(folder / "rollouts/step_000001.parquet")
    ]
    refused = run("tune", "tune.yaml", "--resume", expected_status=1)
    assert f"but {folder}: to resume it, set project=AgentScope" in refused
    assert not (kept / "runs/tunesmith").exists()
    resume = ("tune", "tune.yaml", "--resume", "--set", "project=AgentScope")
    refused = run(*resume, "--set", "algorithm.group_size=4", expected_status=1)
    assert f"{folder} was made with other settings: algorithm.group_size was 2, is 4. Restore them" in refused
    run(*resume)
    metrics = load_metrics(folder / "metrics.jsonl")
    assert metrics[:2] == committed and [row["step"] for row in metrics] == [1, 2, 3, 4]
    rollouts = load_rollouts(folder / "rollouts/step_000001.parquet")
    assert [[each.turns for each in group.trajectories] for group in rollouts] == turns
    assert (folder / "global_step_4/DONE.json").exists()


def test_a_killed_fine_tuning_resumes_from_its_checkpoint(kept):
    committed = load_metrics(kept / "sft/metrics.jsonl")[:2]
    refused = run("sft", "sft.yaml", "--out", "sft", "--set", "num_epochs=2", expected_status=1)
    assert f"{kept / 'sft'} was made with other settings: num_epochs was 8, is 2. Restore them" in refused
    assert re.search(r"steps +24 on 6 rows", run("sft", "sft.yaml", "--out", "sft"))
    metrics = load_metrics(kept / "sft/metrics.jsonl")
    assert metrics[:2] == committed and [row["step"] for row in metrics] == list(range(1, 25))
    assert metrics[-1]["train/loss"] < metrics[0]["train/loss"]


def test_a_finished_training_returns_its_result(kept):
    before = (kept / "prefer/metrics.jsonl").read_text()
    assert re.search(r"steps +6 on 6 rows\n +loss +0.6926", run("prefer", "prefer.yaml", "--out", "prefer"))
    assert (kept / "prefer/metrics.jsonl").read_text() == before
    refused = run("prefer", "prefer.yaml", "--out", "prefer", "--set", "num_epochs=2", expected_status=1)
    assert "was made with other settings: num_epochs was 1, is 2" in refused


def test_a_killed_measurement_of_pass_rates_resumes_after_its_last_batch(kept):
    arguments = ("pass-rate", "pass_rate.yaml", "--field", "rate", "--out", "rated.jsonl", "--runs")
    refused = run(*arguments, "3", expected_status=1)
    assert "rated.jsonl.part was made with other settings: which ones is unknown, as an earlier version" in refused
    (kept / "rated.jsonl.part").write_text("[[0, 0.25], [1, 0.75]]\n[[2, 0.2")
    run(*arguments, "2")
    assert [row["rate"] for row in read_lines(kept / "rated.jsonl")][:2] == [0.25, 0.75]
    assert len(read_lines(kept / "rated.jsonl")) == 6
    assert sorted(path.name for path in kept.glob("rated*")) == ["rated.jsonl"]


def test_a_killed_evaluation_keeps_what_it_has_evaluated(kept):
    (part,) = (kept / "eval/parts").iterdir()
    saved = json.loads(part.read_text())["tasks"]
    assert "first on first_set: already evaluated" in run("eval", "eval.yaml", "--out", "eval")
    found = json.loads((kept / "eval/comparison.json").read_text())["first_set"]["models"]["first"]["tasks"]
    assert found == saved
    assert not (kept / "eval/parts").exists()


def test_a_killed_preparation_keeps_the_pass_rates_it_has_measured(kept):
    (part,) = (kept / "prepare.work").glob("*.part")
    assert len(read_lines(part)) == 1
    before = part.stat().st_ino
    os.link(part, kept / "same")
    run("prepare", "prepare.yaml", "--out", "prepare")
    assert (kept / "same").stat().st_ino == before and len(read_lines(kept / "same")) == 2  # it was appended to
    assert len(read_lines(kept / "prepare/train.jsonl")) == 4
    assert not (kept / "prepare.work").exists()


def test_a_finished_preparation_is_reused(kept):
    stamp = (kept / "prepared/train.jsonl").stat().st_mtime_ns
    run("prepare", "prepared.yaml", "--out", "prepared")
    assert (kept / "prepared/train.jsonl").stat().st_mtime_ns == stamp
    refused = run("prepare", "prepared.yaml", "--out", "prepared", "--style", "last", expected_status=1)
    assert f"{kept / 'prepared'} was made with other settings: style was 'all', is 'last'. Restore them" in refused
    with (kept / "problems.jsonl").open("a") as file:
        file.write((kept / "problems.jsonl").read_text())
    refused = run("prepare", "prepared.yaml", "--out", "prepared", expected_status=1)
    assert "was made with other settings: the content of data changed. Restore them" in refused


def test_a_finished_export_is_reused(kept):
    (weights,) = (kept / "prefer/model").glob("*.safetensors")
    _, modified = json.loads((kept / "export/DONE.json").read_text())["source"]["files"][weights.name]
    os.utime(weights, ns=(modified, modified))
    stamp = (kept / "export/adapter/README.md").stat().st_mtime_ns
    run("export", "prefer", "--out", "export", "--set", "formats=[adapter]")
    assert (kept / "export/adapter/README.md").stat().st_mtime_ns == stamp
    refused = run("export", "prefer", "--out", "export", "--set", "formats=[hf]", expected_status=1)
    assert "export was made with other settings: formats was ['adapter'], is ['hf']. Restore them" in refused


def test_a_search_index_opens(kept):
    assert [hit.passage_id for hit in SearchIndex(kept / "index").search("1702", top_n=1)] == ["2"]


def test_a_killed_pipeline_skips_what_is_done_and_resumes_its_flywheel(kept):
    attempts = (kept / "pipeline/flywheel/attempts.jsonl").read_text()
    output = run("run", "pipeline.yaml")
    assert "stage 1/3 make: already done, skipped" in output and "stage 2/3 prepare: already done, skipped" in output
    assert "stage 3/3 flywheel: resumed" in output and "stage 3/3 flywheel: done" in output
    assert (kept / "pipeline/flywheel/attempts.jsonl").read_text().startswith(attempts)
    rows = read_lines(kept / "pipeline/flywheel/trajectories.jsonl")
    assert {row["iteration"] for row in rows} == {0, 1}
    assert (kept / "pipeline/stages/flywheel/DONE.json").exists()
