"""Reading run folders: states, errors, merged files, old configs; the command and the Python function."""

from __future__ import annotations

import fcntl
import json
import os
import re
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner
from write_failing_runs import Start

import tunesmith
from tunesmith import AlgorithmConfig, JudgeOutput, WorkflowOutput
from tunesmith.cli import app
from tunesmith.commands.doctor.diagnose import OFFLINE_CHECKS, RL_CHECKS, SHARED_CHECKS, diagnose
from tunesmith.commands.doctor.record import open_run
from tunesmith.config import RunConfig
from tunesmith.errors import StorageError

DOCS = Path(__file__).parents[3] / "docs" / "doctor.md"
STOPS = list(range(3, 608, 8))
"""Token ids that end an answer of the untrained model after 8 tokens on average."""


async def ask_briefly(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    completion = await model(messages, max_tokens=60, extra_body={"stop_token_ids": STOPS})
    return WorkflowOutput(response=completion.choices[0].message.content)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory, pocket_folder):
    """The diagnosis of a run of 12 steps that samples, trains and is saved without trouble."""
    start = Start(tmp_path_factory.mktemp("healthy"), pocket_folder, "x")
    start(
        "model.max_tokens=60",
        "steps_per_file=5",
        "save_interval_steps=5",
        "algorithm.kl_coef=0.001",
        steps=12,
        workflow_func=ask_briefly,
        algorithm=AlgorithmConfig(group_size=4, batch_size=4, learning_rate=1e-4),
    )
    return diagnose(start.root)


def test_a_healthy_run_has_no_finding_but_figures(healthy):
    assert healthy.findings == ()
    assert (healthy.state, healthy.num_steps, healthy.total_steps) == ("finished", 12, 12)
    names = [each.check for each in healthy.passed]
    assert set(names) | set(healthy.not_checked) == (SHARED_CHECKS | RL_CHECKS).keys()
    assert set(healthy.not_checked) == {"evaluation"}
    text = str(healthy)
    assert "no finding" in text and "truncation: 0.0% of recent rollouts were truncated" in text
    assert "training" in healthy.step_time


def test_rollouts_of_merged_files_are_read_by_columns(healthy):
    record = open_run(healthy.folder)
    assert len(list((healthy.folder / "rollouts").iterdir())) == 4
    assert record.rollouts.list_steps() == list(range(1, 13))
    for step in (3, 12):
        table = record.rollouts.read_table(step, ("task_id", "turns.stop_reason"))
        assert table.num_rows == 16 and table.column_names == ["task_id", "turns"]
        assert {key for row in table.to_pylist() for turn in row["turns"] for key in turn} == {"stop_reason"}


def test_the_command_prints_text_or_json_and_exits_with_status_0(run, monkeypatch):
    monkeypatch.setattr(import_module("tunesmith.cli"), "run_guarded", lambda work, is_debug: work())
    folder = run(steps=1).folder
    printed = CliRunner().invoke(app, ["doctor", str(folder)])
    assert printed.exit_code == 0 and "error: truncation: " in printed.output and "  change: " in printed.output
    printed = CliRunner().invoke(app, ["doctor", str(folder), "--json"])
    assert printed.exit_code == 0
    diagnosis = json.loads(printed.output)
    (finding,) = diagnosis["findings"]
    assert finding["check"] == "truncation" and finding["settings"] == {"model.max_tokens": 24}
    assert finding["evidence"][0]["steps"] == [1, 1]


def test_results_and_checkpoints_are_accepted_in_place_of_the_folder(run):
    folder = run(steps=1).folder
    assert diagnose(folder / "global_step_1").folder == folder
    result = tunesmith.TuneResult(
        folder=folder, checkpoint=None, num_steps=1, has_learned=True, metrics={}, evaluations={}
    )
    assert tunesmith.doctor(result) == diagnose(str(folder))


def test_a_folder_without_a_run_is_an_error_that_names_runs_below(run, tmp_path):
    folder = run(steps=1).folder
    with pytest.raises(StorageError, match=f"is not the folder of a run: choose one of {folder}"):
        diagnose(tmp_path / "runs")
    with pytest.raises(StorageError, match="there is no such folder"):
        diagnose(tmp_path / "none")


def test_running_interrupted_and_finished_runs_are_distinguished(run):
    folder = run(steps=1).folder
    with (folder / "run.lock").open("w+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f"{os.getpid()}\n".encode())
        lock.flush()
        assert diagnose(folder).state == "running"
    assert diagnose(folder).state == "finished"
    (folder / "run.lock").write_text("999999999\n")
    (folder / "last_commit.json").unlink()
    (folder / "global_step_1").rename(folder / "moved")
    diagnosis = diagnose(folder)
    assert diagnosis.state == "interrupted"
    assert "continue_from_checkpoint=true" in next(e for e in diagnosis.findings if e.check == "stopped").change


def test_the_error_that_stopped_a_run_is_recorded_until_it_is_resumed(run, tmp_path):
    is_broken = [False]

    async def judge(task, response):
        if is_broken[0]:
            raise RuntimeError("the judge broke")
        return JudgeOutput(reward=float(sum(map(ord, response)) % 7))

    def break_now(groups):
        is_broken[0] = True
        return groups, {}

    diagnosis = run(
        "save_interval_steps=1", steps=2, judge_func=judge, workflow_func=ask_briefly, operators=[break_now]
    )
    error = json.loads((diagnosis.folder / "error.json").read_text())
    assert (error["step"], error["error"]) == (2, "RolloutError") and "the judge broke" in error["message"]
    assert diagnosis.state == "failed" and diagnosis.findings[0].check == "stopped"
    is_broken[0] = False
    run("save_interval_steps=1", "continue_from_checkpoint=true", steps=2, judge_func=judge, workflow_func=ask_briefly)
    assert not (diagnosis.folder / "error.json").exists()
    assert diagnose(diagnosis.folder).state == "finished"


def test_configs_of_earlier_versions_are_read_without_what_is_refused_now(run):
    folder = run(steps=1).folder
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("  group_size: 4", "  group_size: 4\n  removed_knob: 3"))
    config.write_text(config.read_text().replace("  page_size: 16", "  page_size: 0"))
    record = open_run(folder)
    assert isinstance(record.config, RunConfig)
    assert record.config.algorithm.group_size == 4 and record.config.engine.page_size == 16


def test_knobs_of_earlier_versions_that_need_others_are_left_out_alone(run):
    folder = run(steps=1).folder
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("  num_samples: 1", "  num_samples: 4"))
    config.write_text(config.read_text().replace("  min_lr_ratio: 0.0", "  min_lr_ratio: 0.1"))
    record = open_run(folder)
    assert record.config.evaluation.num_samples == 1 and record.config.trainer.min_lr_ratio == 0
    assert record.config.trainer.learning_rate == record.settings["trainer"]["learning_rate"]


def test_every_check_is_documented():
    names = SHARED_CHECKS.keys() | RL_CHECKS.keys() | OFFLINE_CHECKS.keys()
    documented = re.findall(r"^\| `([a-z-]+)` \|", DOCS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(documented) == sorted(names)
