"""One record of a run: the same state, steps and checkpoints for everything that reads the folder."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys

import pytest

from tunesmith.commands.doctor.diagnose import diagnose
from tunesmith.config import OfflineConfig, PreferenceConfig, RunConfig
from tunesmith.errors import StorageError
from tunesmith.runs.record import OFFLINE_KEYS, RunRecord, RunState, find_run_folders
from tunesmith.storage import DONE, RunPaths, save_json
from tunesmith.viewer.answers.overview import describe_runs
from tunesmith.viewer.reading.run import open_runs

TUNE = {"model": {"path": "m"}, "total_steps": 8, "save_interval_steps": 2}
SFT = {"model": {"path": "m"}, "train_dataset": {"path": "d"}, "num_epochs": 2, "algorithm_type": "sft"}


@pytest.fixture
def root(tmp_path):
    return tmp_path / "run"


def write_run(root, values, *, num_steps, saved=()):
    """A run with metrics of `num_steps` steps and complete checkpoints of the steps in `saved`."""
    root.mkdir()
    (root / "config.yaml").write_text(json.dumps(values))
    lines = [{"step": step, "kind": "train", "train/loss": 1 / step} for step in range(1, num_steps + 1)]
    (root / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in saved:
        save_json(RunPaths(root).checkpoint(step) / DONE, {"step": step})
    return RunRecord(root)


def find_states(root):
    """The state in the record, in the page of the viewer and in the diagnosis."""
    page = describe_runs(open_runs([root]))["runs"][0]
    return {RunRecord(root).state, RunState(page["state"]), diagnose(root).state}


def test_the_run_of_the_module_docstring(root):
    write_run(root, TUNE, num_steps=3, saved=[3])
    save_json(root / "stopped.json", {"step": 3, "reason": "reward is 1"})
    save_json(root / "last_commit.json", {"step": 3})
    save_json(root / "eval/step_000003.json", {"test": {"mean": 1.0}})
    run = RunRecord(root)
    assert (run.kind, run.num_steps, run.total_steps) == ("tune", 3, 8)
    assert (run.state, run.stop_reason) == (RunState.EARLY_STOPPED, "reward is 1")
    assert run.list_evaluated_steps() == [3] and run.load_evaluation(3) == {"test": {"mean": 1.0}}
    assert run.committed_step == 3 and [path.name for path in run.checkpoints] == ["global_step_3"]
    assert run.metrics.get("train/loss").values.tolist() == [1, 1 / 2, 1 / 3]
    assert run.error is None and run.rollouts.list_steps() == []


def test_settings_are_those_of_the_file_now(root):
    run = write_run(root, TUNE, num_steps=1)
    assert run.total_steps == 8
    (root / "config.yaml").write_text(json.dumps(TUNE | {"total_steps": 12}))
    os.utime(root / "config.yaml", ns=(0, 1))
    assert run.total_steps == 12, "a resumed run may be longer"


def test_viewer_and_doctor_call_a_run_that_ended_early_early_stopped(root):
    write_run(root, TUNE, num_steps=3, saved=[3])
    save_json(root / "stopped.json", {"step": 3, "reason": "reward is 1"})
    assert find_states(root) == {RunState.EARLY_STOPPED}
    (passed,) = [each for each in diagnose(root).passed if each.check == "stopped"]
    assert passed.figure == "early-stopped, reward is 1"


@pytest.mark.parametrize(
    ("num_steps", "saved", "state"),
    [
        (8, [8], "finished"),
        (8, [6], "interrupted"),  # killed before the checkpoint of the last step
        (6, [6], "interrupted"),
        (1, [], "interrupted"),
        (0, [], "interrupted"),
    ],
)
def test_a_run_is_finished_when_its_last_step_is_saved(root, num_steps, saved, state):
    write_run(root, TUNE, num_steps=num_steps, saved=saved)
    assert find_states(root) == {state}


def test_a_finished_run_whose_checkpoints_were_removed_is_finished(root):
    write_run(root, TUNE, num_steps=8)
    save_json(root / "last_commit.json", {"step": 8})
    assert find_states(root) == {"finished"}


def test_an_incomplete_checkpoint_does_not_count(root):
    run = write_run(root, TUNE, num_steps=8, saved=[6, 8])
    (root / "global_step_8" / DONE).unlink()
    assert find_states(root) == {"interrupted"} and run.committed_step == 6


def test_a_run_of_epochs_is_finished_when_its_newest_step_is_saved(root):
    values = {name: value for name, value in TUNE.items() if name != "total_steps"}
    write_run(root, values, num_steps=5, saved=[4])
    assert find_states(root) == {"interrupted"}
    save_json(RunPaths(root).checkpoint(5) / DONE, {"step": 5})
    assert find_states(root) == {"finished"}


def test_an_error_and_a_running_process_come_before_everything_else(root):
    write_run(root, TUNE, num_steps=8, saved=[8])
    save_json(root / "error.json", {"step": 8, "error": "JudgeError", "message": "the judge broke"})
    assert find_states(root) == {"failed"} and RunRecord(root).error["message"] == "the judge broke"
    with (root / "run.lock").open("w+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f"{os.getpid()}\n".encode())
        lock.flush()
        assert find_states(root) == {"running"}
    assert find_states(root) == {"failed"}


def test_a_fine_tuning_has_ended_when_its_model_is_written(root):
    run = write_run(root, SFT, num_steps=4, saved=[4])
    assert find_states(root) == {"interrupted"} and run.kind == "sft" and run.trained is None
    save_json(root / "model" / DONE, {"step": 4, "figures": {"stop_reason": None}})
    assert find_states(root) == {"finished"} and run.trained == root / "model"
    save_json(root / "model" / DONE, {"step": 2, "figures": {"stop_reason": "eval/loss has not improved"}})
    assert find_states(root) == {"early-stopped"} and run.stop_reason == "eval/loss has not improved"


def test_kinds_follow_from_the_keys_of_the_settings(tmp_path):
    assert PreferenceConfig.model_fields.keys() - RunConfig.model_fields.keys() == OFFLINE_KEYS
    assert OfflineConfig.model_fields.keys() - RunConfig.model_fields.keys() <= OFFLINE_KEYS
    settings = {"tune": TUNE, "serve": TUNE | {"serve": {}}, "sft": SFT, "prefer": SFT | {"algorithm_type": "dpo"}}
    for kind, values in settings.items():
        assert write_run(tmp_path / kind, values, num_steps=1).kind == kind
    (tmp_path / "tune/config.yaml").unlink()
    assert RunRecord(tmp_path / "tune").kind == "other"
    save_json(tmp_path / "eval/comparison.json", {})
    assert (RunRecord(tmp_path / "eval").kind, RunRecord(tmp_path / "eval").state) == ("eval", "finished")


def test_folders_of_earlier_versions_had_a_checkpoint_every_interval(root):
    run = write_run(root, TUNE, num_steps=5)
    assert run.committed_step == 4
    save_json(root / "last_commit.json", {"step": 2})
    assert run.committed_step == 2


def test_folders_below_a_path_leave_out_archives_in_runs_only(tmp_path):
    runs = tmp_path / "old-results" / "runs"
    runs.mkdir(parents=True)
    run = write_run(runs / "a", TUNE, num_steps=1, saved=[1])
    write_run(runs / "a" / "old-2025", TUNE, num_steps=1)
    assert find_run_folders(runs) == [run.root]
    assert find_run_folders(run.root / "global_step_1") == [run.root]
    with pytest.raises(StorageError, match="there is no such folder"):
        find_run_folders(tmp_path / "none")


def test_the_record_imports_no_slow_library(root):
    write_run(root, TUNE, num_steps=3, saved=[3])
    program = """
import sys
from pathlib import Path
from tunesmith.runs.record import RunRecord
run = RunRecord(Path(sys.argv[1]))
print(run.kind, run.state, run.num_steps, run.settings["total_steps"], run.rollouts.list_steps(), run.checkpoints)
print(sorted({"torch", "transformers", "pandas", "omegaconf"} & sys.modules.keys()))
"""
    found = subprocess.run([sys.executable, "-c", program, str(root)], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"
