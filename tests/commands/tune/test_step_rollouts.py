"""The file of a step's rollouts is written once: with advantages if the step came to its update."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tunesmith.commands.tune.checkpoints import save_unfinished
from tunesmith.experience.store import load_rollouts, load_table, save_rollouts
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
