"""The replay buffer draws fresh groups by priority, and a restored buffer draws the same ones."""

from __future__ import annotations

import json
from dataclasses import replace

from tunesmith.algorithms.algorithm import compute_group_advantages, resolve_algorithm
from tunesmith.config import AlgorithmSection, ReplaySection
from tunesmith.experience.replay import ReplayBuffer
from tunesmith.types import Distribution, Failure, Group, Task, Trajectory, Turn

TURN = Turn(
    prompt_ids=(1,), sampled_ids=(2,), logprobs=(-1.0,), policy_versions=(0,), distribution=Distribution(),
    stop_reason="eos",
)  # fmt: skip


def groups_of(step, num_groups=3):
    """The groups collected in a step: two scored rollouts and a failed one each."""
    groups = []
    for index in range(num_groups):
        task = Task(task_id=f"t/{step}-{index}", index=index, row={})
        runs = [
            Trajectory(task=task, run_index=0, turns=(TURN, TURN), reward=1.0),
            Trajectory(task=task, run_index=1, turns=(TURN,), reward=0.25),
            Trajectory(task=task, run_index=2, turns=(), reward=None, failure=Failure(where="judge", message="x")),
        ]
        groups.append(Group(task=task, trajectories=tuple(runs)))
    return groups


def add(buffer, step, **options):
    groups = groups_of(step, **options)
    buffer.add(groups, list(range(len(groups))), step=step, policy_version=step - 1)


def names(groups):
    return [group.task.task_id.removeprefix("t/") for group in groups]


def build(**settings):
    return ReplayBuffer(ReplaySection(**({"num_groups": 2} | settings)), seed=0)


def test_off_by_default():
    buffer = ReplayBuffer(ReplaySection(), seed=0)
    add(buffer, 1)
    assert len(buffer) == 0 and buffer.sample(policy_version=1) == []


def test_newest_groups_come_first_and_each_use_lowers_priority():
    buffer = build(decay=2.0)
    add(buffer, 1, num_groups=2)
    add(buffer, 2, num_groups=2)
    assert names(buffer.sample(policy_version=2)) == ["2-0", "2-1"]
    assert names(buffer.sample(policy_version=2)) == ["1-0", "1-1"]
    assert names(buffer.sample(policy_version=2)) == ["2-0", "2-1"]


def test_stale_and_used_up_groups_are_evicted():
    buffer = build(max_uses=1, max_staleness=2)
    add(buffer, 1)
    buffer.sample(policy_version=2)
    assert len(buffer) == 1
    assert buffer.sample(policy_version=3) == [] and len(buffer) == 0


def test_over_capacity_the_lowest_priority_is_evicted():
    buffer = build(capacity=4)
    add(buffer, 1)
    add(buffer, 2)
    assert names(buffer.sample(policy_version=2) + buffer.sample(policy_version=2)) == ["2-0", "2-1", "2-2", "1-0"]


def test_noise_changes_the_order_deterministically():
    def order(sigma):
        buffer = build(sigma=sigma, num_groups=6)
        add(buffer, 1)
        add(buffer, 2)
        return names(buffer.sample(policy_version=2))

    assert order(0.0) != order(5.0) == order(5.0)


def test_a_restored_buffer_draws_the_same_groups_with_operator_changes():
    buffer = build(sigma=1.0)
    for step in (1, 2, 3):
        changed = [
            replace(
                group,
                trajectories=tuple(
                    replace(
                        run, reward=run.reward + 0.1, turns=(replace(run.turns[0], is_trained=False), *run.turns[1:])
                    )
                    for run in group.trajectories[:2]
                ),
            )
            for group in groups_of(step)
        ]
        buffer.add(changed, [0, 1, 2], step=step, policy_version=step - 1)
    buffer.sample(policy_version=3)
    restored = build(sigma=1.0)
    restored.load_state_dict(json.loads(json.dumps(buffer.state_dict())), groups_of)
    for version in (3, 4, 5, 6):
        assert restored.sample(policy_version=version) == buffer.sample(policy_version=version)


def test_a_restored_buffer_has_the_metrics_that_operators_set():
    """The step rewards of `gigpo`, which an operator added to what the rollouts on disk hold."""
    algorithm = resolve_algorithm(
        AlgorithmSection(algorithm_type="gigpo", advantage_args={"step_reward_key": "step_reward"})
    )
    group = groups_of(1, num_groups=1)[0]
    scored = [
        replace(run, metrics={"step_reward/0": 1.0 - run.run_index, "step_reward/1": 0.5}) for run in group.scored
    ]
    buffer = build(num_groups=1)
    buffer.add([replace(group, trajectories=tuple(scored))], [0], step=1, policy_version=0)
    restored = build(num_groups=1)
    restored.load_state_dict(json.loads(json.dumps(buffer.state_dict())), groups_of)
    live, read = buffer.sample(policy_version=0), restored.sample(policy_version=0)
    assert read == live
    advantages, _ = compute_group_advantages(algorithm, read)
    assert advantages == compute_group_advantages(algorithm, live)[0] and None not in advantages[0]


def test_a_buffer_without_metrics_has_those_of_the_rollouts():
    group = groups_of(1, num_groups=1)[0]
    whole = replace(group, trajectories=tuple(replace(run, metrics={"acc": 1.0}) for run in group.trajectories))
    buffer = build(num_groups=1)
    buffer.add([whole], [0], step=1, policy_version=0)
    state = buffer.state_dict()
    for run in state["entries"][0]["runs"]:
        run.pop("metrics", None)
    buffer.load_state_dict(state, lambda step: [whole])
    assert buffer.sample(policy_version=0) == [whole]


def test_each_draw_is_one_use_and_newer_steps_win_ties():
    buffer = build(decay=0.0, max_uses=3, num_groups=1)
    add(buffer, 1, num_groups=1)
    assert [len(buffer.sample(policy_version=0)) for _ in range(4)] == [1, 1, 1, 0]
    buffer = build(decay=1.0, num_groups=1)
    add(buffer, 1, num_groups=1)
    groups = groups_of(2, num_groups=1)
    buffer.add(groups, [0], step=2, policy_version=0)
    assert names(buffer.sample(policy_version=0)) == ["2-0"]


def test_sigma_is_the_standard_deviation_of_the_noise():
    """With priorities 10 apart, sigma 1 keeps the order and sigma 1000 shuffles it."""
    for sigma, is_shuffled in ((1.0, False), (1000.0, True)):
        buffer = build(decay=0.0, sigma=sigma, num_groups=8, max_staleness=1000)
        for step in range(1, 9):
            buffer.add(groups_of(step, num_groups=1), [0], step=step, policy_version=10 * step)
        assert (names(buffer.sample(policy_version=80)) != [f"{step}-0" for step in range(8, 0, -1)]) == is_shuffled
