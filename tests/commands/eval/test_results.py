"""Evaluation results of groups whose numbers are worked out by hand."""

from __future__ import annotations

import pytest

from tunesmith.commands.eval.results import compute_evaluation
from tunesmith.errors import ConfigError
from tunesmith.types import Failure, Group, Task, Trajectory


def build_group(index, rewards, metrics=None):
    task = Task(task_id=f"t/{index}", index=index, row={})
    trajectories = []
    for run_index, reward in enumerate(rewards):
        failure = Failure(where="judge", message="no verdict") if reward is None else None
        trajectories.append(
            Trajectory(task=task, run_index=run_index, turns=(), reward=reward, metrics=metrics or {}, failure=failure)
        )
    return Group(task=task, trajectories=tuple(trajectories))


def test_the_mean_is_over_tasks_and_failures_are_excluded_and_counted():
    groups = [build_group(0, [1.0, 0.0, 0.0]), build_group(1, [1.0, None]), build_group(2, [None])]
    result = compute_evaluation("held_out", groups, policy_version=3)
    assert result.mean == pytest.approx((1 / 3 + 1) / 2)
    assert result.num_failures == 2
    metrics = result.to_metrics()
    assert metrics["eval/held_out/reward"] == result.mean
    assert metrics["eval/held_out/num_failures"] == 2.0
    assert metrics["eval/held_out/reward_low"] <= result.mean <= metrics["eval/held_out/reward_high"]


def test_an_evaluation_with_only_failures_has_no_reward():
    result = compute_evaluation("held_out", [build_group(0, [None])], policy_version=0)
    assert result.mean is None
    assert result.interval is None
    assert "eval/held_out/reward" not in result.to_metrics()


def test_reported_metrics_are_averaged_over_rollouts():
    groups = [build_group(0, [1.0], {"num_calls": 2.0}), build_group(1, [0.0], {"num_calls": 4.0})]
    assert compute_evaluation("a", groups, policy_version=0).to_metrics()["eval/a/num_calls"] == 3.0


def test_pass_at_k_is_over_tasks_with_at_least_k_scored_rollouts():
    groups = [build_group(0, [1.0, 0.0, 0.0, 0.0]), build_group(1, [1.0, 1.0, 0.0, None])]
    result = compute_evaluation("held_out", groups, policy_version=0)
    assert result.pass_at_k == {
        1: pytest.approx((1 / 4 + 2 / 3) / 2),
        2: pytest.approx(((1 - 3 / 6) + 1) / 2),
        4: pytest.approx(1.0),
    }
    assert result.to_metrics()["eval/held_out/pass@2"] == pytest.approx(0.75)


def test_pass_at_k_needs_binary_outcomes_from_the_reward_or_a_metric():
    groups = [build_group(0, [0.3, 0.7], {"accuracy": 1.0}), build_group(1, [0.1, 0.2], {"accuracy": 0.0})]
    assert compute_evaluation("a", groups, policy_version=0).pass_at_k == {}
    found = compute_evaluation("a", groups, policy_version=0, outcome_key="accuracy")
    assert found.pass_at_k == {1: 0.5, 2: 0.5}
    with pytest.raises(ConfigError, match="'exact' is not a metric of rollout 0.*change experience.outcome_key"):
        compute_evaluation("a", groups, policy_version=0, outcome_key="exact")
