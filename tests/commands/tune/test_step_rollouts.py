"""What a failed step leaves: its rollouts, with advantages if it came to its update, and the error of the run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fakes import full_disk
from small_runs import build_small_run, list_apples, write_splits
from tunesmith.commands.tune.checkpoints import save_unfinished
from tunesmith.commands.tune.tune import Training
from tunesmith.errors import StorageError
from tunesmith.experience.store import load_rollouts, load_table, save_rollouts
from tunesmith.runs.record import RunRecord
from tunesmith.types import Group, Task, Trajectory

TASK = Task(task_id="t/0", index=0, row={"question": "one"})
RUNS = tuple(Trajectory(task=TASK, run_index=index, turns=(), reward=float(index)) for index in range(2))


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_step_that_fails_in_its_update_keeps_its_advantages(tmp_path, is_saved):
    group, path = Group(task=TASK, trajectories=RUNS), tmp_path / "step_000003.parquet"
    if is_saved:
        save_rollouts(path, [group], [[-0.5, 0.5]])
    save_unfinished(path, RUNS[:1])
    assert load_rollouts(path) == [group if is_saved else Group(task=TASK, trajectories=RUNS[:1])]
    assert load_table(path)["advantage"].to_pylist() == ([-0.5, 0.5] if is_saved else [None])


def test_a_failed_step_keeps_the_rollouts_of_every_group_of_a_task(tmp_path):
    other = Task(task_id="t/1", index=1, row={"question": "two"})
    again = tuple(replace(run, response_text="again") for run in RUNS)
    alone = Trajectory(task=other, run_index=0, turns=(), reward=1.0)
    path = tmp_path / "step_000003.parquet"
    save_unfinished(path, [RUNS[0], again[0], alone, RUNS[1], again[1]])
    assert load_rollouts(path) == [
        Group(task=TASK, trajectories=RUNS),
        Group(task=TASK, trajectories=again),
        Group(task=other, trajectories=(alone,)),
    ]


def test_a_full_disk_during_a_checkpoint_is_the_error_of_the_run(tmp_path, pocket_folder, monkeypatch):
    run = build_small_run(tmp_path, str(pocket_folder), write_splits(tmp_path / "data", list_apples(4)))
    commit = Training.commit

    def fill_disk(training, *arguments):
        with full_disk(200_000):
            commit(training, *arguments)

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="cannot write") as raised:
        patch.setattr(Training, "commit", fill_disk)
        run()
    (folder,) = (tmp_path / "runs").glob("*/x")
    record = RunRecord(folder)
    assert record.state == "failed"
    assert record.error == {"step": 2, "error": "StorageError", "message": str(raised.value)}
    run("continue_from_checkpoint=true")
    assert record.error is None and RunRecord(folder).state == "finished"
