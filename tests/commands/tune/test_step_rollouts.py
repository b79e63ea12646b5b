"""The file of a step's rollouts is written once: with advantages if the step came to its update."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tunesmith.commands.tune.checkpoints import StepRollouts
from tunesmith.experience.batch import Batch, BatchSize
from tunesmith.experience.store import load_rollouts, load_table
from tunesmith.types import Group, Task, Trajectory

TASK = Task(task_id="t/0", index=0, row={"question": "one"})
RUNS = tuple(Trajectory(task=TASK, run_index=index, turns=(), reward=float(index)) for index in range(2))


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_step_that_fails_in_its_update_keeps_its_advantages(tmp_path, is_saved):
    group, rollouts = Group(task=TASK, trajectories=RUNS), StepRollouts(tmp_path / "step_000003.parquet")
    if is_saved:
        batch = Batch(size=BatchSize(num_groups=1, max_tasks=1))
        batch.add_round([group], [group], {}, has_advantage=[True])
        rollouts.save(batch, [[-0.5, 0.5]])
    rollouts.save_unfinished(RUNS[:1])
    path = tmp_path / "step_000003.parquet"
    assert load_rollouts(path) == [group if is_saved else Group(task=TASK, trajectories=RUNS[:1])]
    assert load_table(path)["advantage"].to_pylist() == ([-0.5, 0.5] if is_saved else [None])


def test_a_failed_step_keeps_the_rollouts_of_every_group_of_a_task(tmp_path):
    other = Task(task_id="t/1", index=1, row={"question": "two"})
    again = tuple(replace(run, response_text="again") for run in RUNS)
    alone = Trajectory(task=other, run_index=0, turns=(), reward=1.0)
    path = tmp_path / "step_000003.parquet"
    StepRollouts(path).save_unfinished([RUNS[0], again[0], alone, RUNS[1], again[1]])
    assert load_rollouts(path) == [
        Group(task=TASK, trajectories=RUNS),
        Group(task=TASK, trajectories=again),
        Group(task=other, trajectories=(alone,)),
    ]
