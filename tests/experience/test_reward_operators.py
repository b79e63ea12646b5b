"""Operators that compute rewards from recorded tool calls and tokens: what they read and refuse, and their schedule."""

from __future__ import annotations

import pytest

from tunesmith.algorithms.algorithm import compute_group_advantages, resolve_algorithm
from tunesmith.config import AlgorithmSection, ExperienceSection, OperatorSection
from tunesmith.errors import ConfigError
from tunesmith.experience.table import apply_operators, build_operators
from tunesmith.types import Distribution, Failure, Group, Task, Trajectory, Turn


def turn_of(num_tokens, reason="eos", is_trained=True):
    return Turn(
        prompt_ids=(1,) * 50,
        sampled_ids=(2,) * num_tokens,
        logprobs=(-1.0,) * num_tokens,
        policy_versions=(0,) * num_tokens,
        distribution=Distribution(),
        stop_reason=reason,
        is_trained=is_trained,
    )


def run_of(index, reward, num_tokens=(10,), **metrics):
    return Trajectory(
        task=TASK,
        run_index=index,
        turns=tuple(turn_of(each) for each in num_tokens),
        reward=reward,
        metrics={name: float(value) for name, value in metrics.items()},
        failure=None if reward is not None else Failure(where="workflow", message="x"),
    )


TASK = Task(task_id="t/0", index=0, row={})
REFERENCE = [
    run_of(0, 1.0, (60, 40), tool_calls=1),
    run_of(1, 1.0, (100, 100, 100), tool_calls=3),
    run_of(2, 1.0, (200,), tool_calls=2),
]
"""The published example: calls 1, 3, 2 and tokens 100, 300, 200."""


def group_of(*runs):
    return Group(task=TASK, trajectories=runs)


def chain_of(name, outcome_key=None, load=None, **args):
    section = ExperienceSection(operators=[OperatorSection(name=name, args=args)], outcome_key=outcome_key)
    return build_operators(section, load=(load or {}).__getitem__)


def rewards_of(chain, *runs, **position):
    ((group,), metrics) = apply_operators([group_of(*runs)], chain, **position)
    return [run.reward for run in group.trajectories], metrics


def test_the_efficiency_reward_is_computed_from_metrics_and_recorded_tokens():
    rewards, metrics = rewards_of(chain_of("efficiency_reward"), *REFERENCE)
    assert rewards[0] == pytest.approx(1.1142, abs=1e-4)
    assert rewards[2] == 1.0
    named = {name.removeprefix("experience/efficiency_reward/"): value for name, value in metrics.items()}
    assert named["sigma_tool"] == named["sigma_length"] == 0.1
    assert named["correctness_mean"] == 1.0 and named["tool_calls_mean"] == 2.0
    assert named["efficiency"] == pytest.approx((1 + 1 / 3 + 1 / 2) / 3)
    assert named["tool_factor_mean"] == pytest.approx(1.0) and named["num_invalid_formats"] == 0


def test_failed_rollouts_keep_no_reward_and_are_in_no_statistic():
    failed = run_of(3, None, (4000,))
    rewards, _ = rewards_of(chain_of("efficiency_reward"), *REFERENCE, failed)
    assert rewards == [*rewards_of(chain_of("efficiency_reward"), *REFERENCE)[0], None]
    assert rewards_of(chain_of("efficiency_reward"), failed) == (
        [None], {"experience/efficiency_reward/sigma_tool": 0.1, "experience/efficiency_reward/sigma_length": 0.1}
    )  # fmt: skip


def test_advantages_ignore_failed_rollouts():
    algorithm = resolve_algorithm(AlgorithmSection(group_size=4, batch_size=1))
    failed = run_of(3, None, (4000,))
    advantages = []
    for runs in (REFERENCE, [*REFERENCE, failed]):
        groups, _ = apply_operators([group_of(*runs)], chain_of("efficiency_reward"))
        advantages.append(compute_group_advantages(algorithm, groups)[0][0])
    assert advantages[1] == [*advantages[0], None]
    assert advantages[0][0] > 0 > advantages[0][1]


def test_correctness_is_the_outcome_key_and_the_reward_without_one():
    runs = [run_of(0, 0.3, f1=0.8, tool_calls=0), run_of(1, 0.3, f1=0.0, tool_calls=0)]
    assert rewards_of(chain_of("efficiency_reward"), *runs)[0] == [0.3, 0.3]
    assert rewards_of(chain_of("efficiency_reward", outcome_key="f1"), *runs)[0] == [0.8, 0.0]
    assert rewards_of(chain_of("efficiency_reward", tool_keys=["f1"]), *runs)[0] != [0.3, 0.3]


def test_calls_of_several_tools_are_added():
    runs = [run_of(0, 1.0, search=0, python=3), run_of(1, 1.0, search=3, python=0)]
    assert rewards_of(chain_of("efficiency_reward", tool_keys=["search", "python"]), *runs)[0] == [1.0, 1.0]


def test_turns_excluded_from_training_count_as_length():
    """Otherwise a truncated answer would be the shortest of its group."""
    section = ExperienceSection(
        operators=[OperatorSection(name="mask_response_truncated"), OperatorSection(name="efficiency_reward")]
    )
    chain = build_operators(section, load={}.__getitem__)
    cut = Trajectory(task=TASK, run_index=0, turns=(turn_of(900, "length"),), reward=1.0, metrics={"tool_calls": 0.0})
    rewards, _ = rewards_of(chain, cut, run_of(1, 1.0, (10,), tool_calls=0))
    assert rewards[0] < 1 < rewards[1]


def test_sigma_follows_the_step_and_the_curriculum_round():
    def sigma(step, **args):
        _, metrics = rewards_of(chain_of("efficiency_reward", **args), *REFERENCE, step=step, total_steps=5)
        return metrics["experience/efficiency_reward/sigma_tool"], metrics["experience/efficiency_reward/sigma_length"]

    assert sigma(1) == (0.1, 0.1) and sigma(3) == (0.05, 0.05) and sigma(5) == (0.0, 0.0)
    assert sigma(5, decay="none", sigma_tool=2) == (2.0, 0.1)
    assert sigma(3, sigma_tool=[0.4, 0.2], sigma_length=0.6, curriculum_round=2) == pytest.approx((0.1, 0.3))
    rewards, _ = rewards_of(chain_of("efficiency_reward"), *REFERENCE, step=5, total_steps=5)
    assert rewards == [1.0, 1.0, 1.0]


def test_a_format_metric_below_one_costs_the_penalty():
    runs = [run_of(0, 1.0, tool_calls=0, format=1), run_of(1, 1.0, tool_calls=0, format=0.5)]
    rewards, metrics = rewards_of(chain_of("efficiency_reward", format_key="format"), *runs)
    assert rewards == [1.0, 0.0]
    assert metrics["experience/efficiency_reward/num_invalid_formats"] == 1


def test_the_arpo_reward_pays_a_bonus_for_right_answers_that_used_every_tool():
    runs = [
        run_of(0, 1.0, search=1, python=2, format=1),
        run_of(1, 1.0, search=2, python=0, format=1),
        run_of(2, 0.0, search=1, python=1, format=1),
        run_of(3, 1.0, search=1, python=1, format=0),
        run_of(4, None),
    ]
    chain = chain_of("arpo_reward", tool_keys=["search", "python"], format_key="format")
    rewards, metrics = rewards_of(chain, *runs)
    assert rewards == [pytest.approx(1.1), 1.0, 0.0, -1.0, None]
    assert metrics["experience/arpo_reward/num_bonuses"] == 1
    assert metrics["experience/arpo_reward/num_invalid_formats"] == 1
    plain = chain_of("arpo_reward", tool_keys=["search", "python"], bonus=0)
    assert rewards_of(plain, *runs)[0] == [1.0, 1.0, 0.0, 1.0, None]


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("efficiency_reward", {}, r"'tool_calls' is not a metric of rollout 0 .*change tool_keys"),
        ("efficiency_reward", {"tool_keys": ["calls", "cals"]}, r"'cals', which none of 2 rollouts reports.*'calls'"),
        ("efficiency_reward", {"tool_keys": ["some"]}, r"'some' is not a metric of rollout 1 .*change tool_keys"),
        ("efficiency_reward", {"tool_keys": ["calls"], "format_key": "form"}, r"'form', which none of 2 rollouts"),
        ("efficiency_reward", {"tool_keys": ["calls"], "format_key": "some"}, r"rollout 1 .*change format_key"),
        ("efficiency_reward", {"tool_keys": ["calls"], "outcome_key": "some"}, r"'some' is not a metric .*outcome_key"),
        ("efficiency_reward", {"tool_keys": ["calls"], "outcome_key": "debt"}, r"is -1, from the metric 'debt'.*0 or"),
        ("arpo_reward", {"tool_keys": ["calls", "some"]}, r"'some' is not a metric of rollout 1"),
    ],
)
def test_a_missing_or_negative_metric_is_an_error_that_names_the_knob(name, args, message):
    runs = [run_of(0, 1.0, calls=1, some=1, debt=-1), run_of(1, 1.0, calls=1, debt=-1)]
    with pytest.raises(ConfigError, match=message):
        rewards_of(chain_of(name, **args), *runs)


def test_a_negative_reward_is_no_correctness():
    with pytest.raises(ConfigError, match="is -1, from the judge's reward: it must be 0 or more; set outcome_key"):
        rewards_of(chain_of("efficiency_reward"), run_of(0, -1.0, tool_calls=1))


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("efficiency_reward", {"sigma_tool": -0.1}, "sigma_tool=-0.1"),
        ("efficiency_reward", {"sigma_tool": []}, "sigma_tool="),
        ("efficiency_reward", {"tool_keys": []}, "tool_keys="),
        ("efficiency_reward", {"tool_keys": "tool_calls"}, "tool_keys='tool_calls'"),
        ("efficiency_reward", {"decay": "cosine"}, "'linear' or 'none'"),
        ("efficiency_reward", {"curriculum_round": 0}, "greater than 0"),
        ("efficiency_reward", {"step": 3}, "unknown argument 'step'"),
        ("efficiency_reward", {"sigma": 0.1}, "did you mean 'sigma_(tool|length)'"),
        ("arpo_reward", {}, "needs the argument 'tool_keys'"),
    ],
)
def test_invalid_arguments_are_refused_before_the_run(name, args, message):
    with pytest.raises(ConfigError, match=message):
        chain_of(name, **args)


@pytest.mark.parametrize("name", ["sigma_tool", "sigma_length"])
def test_a_round_without_a_sigma_is_refused_before_the_run(name):
    with pytest.raises(ConfigError, match=f"curriculum_round=3, but {name} lists the sigmas of 2 rounds"):
        chain_of("efficiency_reward", **{name: [0.2, 0.1]}, curriculum_round=3)


def test_a_gate_on_efficiency_rewards_is_refused():
    for name, args in (("efficiency_reward", {}), ("arpo_reward", {"tool_keys": ["search"]})):
        section = ExperienceSection(
            operators=[OperatorSection(name=name, args=args), OperatorSection(name="outcome_gate")]
        )
        with pytest.raises(ConfigError, match=f"outcome_gate comes after {name}"):
            build_operators(section, load={}.__getitem__)


def test_a_custom_operator_receives_the_step_if_it_has_no_default_for_it():
    seen = []

    def needs(groups, *, step: int, total_steps: int):
        seen.append((step, total_steps))
        return groups, {}

    def sets(groups, *, step: int = 7):
        seen.append(step)
        return groups, {}

    load = {"mine:needs": needs, "mine:sets": sets}
    apply_operators([group_of(*REFERENCE)], chain_of("mine:needs", load=load), step=2, total_steps=9)
    apply_operators([group_of(*REFERENCE)], chain_of("mine:sets", load=load), step=2, total_steps=9)
    apply_operators([group_of(*REFERENCE)], chain_of("mine:needs", load=load, step=4), step=2, total_steps=9)
    assert seen == [(2, 9), 7, (4, 9)]
