"""What an evaluation says of groups worked out by hand."""

from __future__ import annotations

import random

import pytest

from tunesmith.pipeline.evaluate import compute_bootstrap_interval, compute_evaluation
from tunesmith.types import Failure, Group, Task, Trajectory


def build_group(index, rewards, metrics=None):
    task = Task(task_id=f"t/{index}", index=index, row={})
    runs = []
    for run_index, reward in enumerate(rewards):
        failure = Failure(where="judge", message="no verdict") if reward is None else None
        runs.append(
            Trajectory(task=task, run_index=run_index, turns=(), reward=reward, metrics=metrics or {}, failure=failure)
        )
    return Group(task=task, trajectories=tuple(runs))


def test_the_mean_is_over_tasks_and_failures_are_left_out_and_counted():
    groups = [build_group(0, [1.0, 0.0, 0.0]), build_group(1, [1.0, None]), build_group(2, [None])]
    result = compute_evaluation("held_out", groups, policy_version=3)
    assert result.mean == pytest.approx((1 / 3 + 1) / 2)
    assert result.num_failures == 2
    metrics = result.to_metrics()
    assert metrics["eval/held_out/reward"] == result.mean
    assert metrics["eval/held_out/num_failures"] == 2.0
    assert metrics["eval/held_out/reward_low"] <= result.mean <= metrics["eval/held_out/reward_high"]


def test_an_evaluation_in_which_all_failed_has_no_reward():
    result = compute_evaluation("held_out", [build_group(0, [None])], policy_version=0)
    assert result.mean is None
    assert result.interval is None
    assert "eval/held_out/reward" not in result.to_metrics()


def test_reported_metrics_are_averaged_over_runs():
    groups = [build_group(0, [1.0], {"num_calls": 2.0}), build_group(1, [0.0], {"num_calls": 4.0})]
    assert compute_evaluation("a", groups, policy_version=0).to_metrics()["eval/a/num_calls"] == 3.0


def test_bootstrap_interval_is_near_the_normal_one():
    scores = [1.0] * 60 + [0.0] * 40
    low, high = compute_bootstrap_interval(scores, rng=random.Random(0))
    assert low == pytest.approx(0.6 - 1.96 * 0.049, abs=0.02)
    assert high == pytest.approx(0.6 + 1.96 * 0.049, abs=0.02)
