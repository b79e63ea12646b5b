"""Dynamic sampling fills a batch with groups of non-zero advantage within a task budget; all groups are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tunesmith.experience.batch import Batch, BatchSize
from tunesmith.experience.operators import pass_rate_calculator
from tunesmith.experience.table import BoundOperator, apply_operators
from tunesmith.metric import Count
from tunesmith.types import Distribution, Failure, Group, Task, Trajectory, Turn


def group_of(index, *rewards):
    task = Task(task_id=f"t/{index}", index=index, row={})
    runs = tuple(Trajectory(task=task, run_index=i, turns=(), reward=float(r)) for i, r in enumerate(rewards))
    return Group(task=task, trajectories=runs)


def has_variance(group):
    return len({run.reward for run in group.trajectories}) > 1


def gather(outcomes, *, num_groups, max_tasks, operators=()):
    """The batch after running tasks in order, and its round sizes; `outcomes[i]`: whether group i has variance."""
    batch, round_sizes = Batch(size=BatchSize(num_groups=num_groups, max_tasks=max_tasks)), []
    while batch.num_missing:
        start = sum(round_sizes)
        round_sizes.append(batch.num_missing)
        groups = [group_of(index, 0, int(outcomes[index])) for index in range(start, start + round_sizes[-1])]
        kept, metrics = apply_operators(groups, operators)
        batch.add_round(groups, kept, metrics, has_advantage=[has_variance(group) for group in kept])
    return batch, round_sizes


def test_without_refill_a_batch_is_one_round():
    batch, round_sizes = gather([1, 0, 1], num_groups=3, max_tasks=3)
    assert round_sizes == [3]
    assert batch.groups == batch.collected and batch.positions == [0, 1, 2]
    assert batch.compute_metrics()["experience/num_useful_groups"] == 2


def test_groups_with_zero_advantage_are_replaced_until_the_batch_is_full():
    batch, round_sizes = gather([1, 0, 0, 0, 1, 1, 1], num_groups=3, max_tasks=9)
    assert round_sizes == [3, 2, 1]
    assert [group.task.index for group in batch.groups] == [0, 4, 5] and batch.positions == [0, 4, 5]
    assert len(batch.collected) == 6
    assert batch.compute_metrics()["experience/num_rounds"] == 3
    assert batch.compute_metrics()["experience/num_tasks_tried"] == 6


def test_refilling_stops_at_the_task_budget():
    batch, round_sizes = gather([0] * 9, num_groups=3, max_tasks=5)
    assert round_sizes == [3, 2]
    assert batch.groups == [] and len(batch.collected) == 5


def test_groups_emptied_by_operators_are_not_trained():
    def drop_first(groups):
        return [Group(task=groups[0].task, trajectories=()), *groups[1:]], {"num_dropped": 1, "share": 0.5}

    operator = BoundOperator(name="drop", apply=drop_first)
    batch, round_sizes = gather([1] * 9, num_groups=3, max_tasks=9, operators=[operator])
    assert round_sizes == [3, 1, 1, 1, 1, 1, 1] and len(batch.groups) == 2
    assert batch.compute_metrics()["experience/drop/num_dropped"] == 7
    plain, _ = gather([1] * 3, num_groups=3, max_tasks=3, operators=[operator])
    assert plain.positions == [1, 2]
    assert len(plain.has_advantage) == len(plain.groups)


def test_counts_are_summed_and_floats_averaged_over_groups():
    batch = Batch(size=BatchSize(num_groups=4, max_tasks=8))
    for groups, metrics in (
        ([group_of(index, 0) for index in range(3)], {"a/x": Count(1), "a/rate": 0.0}),
        ([group_of(3, 0)], {"a/x": Count(2), "a/rate": 1.0}),
    ):
        batch.add_round(groups, groups, metrics, has_advantage=[False] * len(groups))
    metrics = batch.compute_metrics()
    assert metrics["a/x"] == 3.0 and metrics["a/rate"] == 0.25


def test_pass_rates_of_rounds_are_averaged_over_the_groups_that_have_one():
    failed = Failure(where="judge", message="no verdict")
    task = group_of(0, 1).task
    run = Trajectory(task=task, run_index=0, turns=(), reward=None, failure=failed)
    unscored = Group(task=task, trajectories=(run,))
    batch = Batch(size=BatchSize(num_groups=4, max_tasks=8))
    for groups in ([group_of(1, 0, 1), unscored, unscored, unscored], [group_of(2, 1, 1), group_of(3, 1, 1)]):
        kept, metrics = apply_operators(groups, [BoundOperator(name="rates", apply=pass_rate_calculator)])
        batch.add_round(groups, kept, metrics, has_advantage=[False] * len(groups))
    metrics = batch.compute_metrics()
    assert metrics["experience/rates/pass_rate_mean"] == pytest.approx((0.5 + 1 + 1) / 3)
    assert metrics["experience/rates/valid_ratio"] == pytest.approx(1 / 3)


def test_advantages_are_laid_out_like_the_collected_groups():
    collected = [group_of(0, 1, 2), group_of(1, 1, 2, 3)]
    kept = Group(task=collected[1].task, trajectories=collected[1].trajectories[::2])
    batch = Batch(size=BatchSize(num_groups=2, max_tasks=2), collected=collected, groups=[kept], positions=[1])
    assert batch.spread([[0.5, None]]) == [[None, None], [0.5, None, None]]


def test_recorded_groups_show_which_turns_operators_excluded():
    turn = Turn(
        prompt_ids=(1,), sampled_ids=(2,), logprobs=(0.0,), policy_versions=(0,), distribution=Distribution(),
        stop_reason="length",
    )  # fmt: skip
    (group,) = [group_of(0, 1, 2)]
    runs = tuple(replace(run, turns=(turn, turn)) for run in group.trajectories)
    collected = Group(task=group.task, trajectories=runs)
    masked = replace(runs[1], reward=9.0, turns=(turn, replace(turn, is_trained=False)))
    kept = Group(task=group.task, trajectories=(runs[0], masked))
    batch = Batch(size=BatchSize(num_groups=1, max_tasks=1), collected=[collected], groups=[kept], positions=[0])
    (recorded,) = batch.recorded
    assert [[each.is_trained for each in run.turns] for run in recorded.trajectories] == [[True, True], [True, False]]
    assert [run.reward for run in recorded.trajectories] == [1.0, 2.0]
