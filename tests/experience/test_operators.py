"""Operators on groups: what each keeps, changes and counts; their names, argument checks and chaining."""

from __future__ import annotations

import pytest

from tunesmith.config import ExperienceSection, OperatorSection
from tunesmith.errors import ConfigError
from tunesmith.experience.operators import (
    compute_pass_rates,
    dapo_dynamic_sampling,
    invalid_reward_filter,
    mask_response_truncated,
    outcome_gate,
    pass_rate_calculator,
    reward_filter,
    reward_shaping_mapper,
    reward_std_filter,
)
from tunesmith.experience.samples import build_samples
from tunesmith.experience.table import OPERATORS, apply_operators, build_operators
from tunesmith.types import Distribution, Failure, Group, Task, Trajectory, Turn


def turn_of(prompt, sampled, reason="eos"):
    return Turn(
        prompt_ids=tuple(prompt),
        sampled_ids=tuple(sampled),
        logprobs=(-1.0,) * len(sampled),
        policy_versions=(0,) * len(sampled),
        distribution=Distribution(),
        stop_reason=reason,
    )


def group_of(*rewards, index=0, metrics=None, num_turns=None):
    """A group with one rollout per reward; None is a failed rollout."""
    task = Task(task_id=f"t/{index}", index=index, row={})
    runs = [
        Trajectory(
            task=task,
            run_index=run_index,
            turns=tuple(turn_of([1], [2]) for _ in range(num_turns[run_index] if num_turns else 1)),
            reward=reward,
            metrics=metrics[run_index] if metrics else {},
            failure=None if reward is not None else Failure(where="workflow", message="x"),
        )
        for run_index, reward in enumerate(rewards)
    ]
    return Group(task=task, trajectories=tuple(runs))


def rewards_of(result):
    return [[run.reward for run in group.trajectories] for group in result[0]]


def test_pass_rates_average_clipped_outcomes_of_rollouts_without_failures():
    groups = [group_of(1.0, 0.0, num_turns=[3, 1]), group_of(-1.0, 3.0, None), group_of(None, None)]
    assert compute_pass_rates(groups, None) == [0.5, 0.5, None]


def test_an_outcome_metric_must_be_reported():
    groups = [group_of(0.2, 0.9, metrics=[{"accuracy": 1.0}, {"accuracy": 0.0}])]
    assert compute_pass_rates(groups, "accuracy") == [0.5]
    with pytest.raises(ConfigError, match="'acuracy' is not a metric of rollout 0 of task t/0 .*outcome_key"):
        compute_pass_rates(groups, "acuracy")


def test_pass_rate_calculator_counts_and_keeps_groups_unchanged():
    groups = [group_of(1, 1), group_of(0, 0), group_of(1, 0), group_of(*[1] * 15, 0), group_of(None)]
    kept, metrics = pass_rate_calculator(groups)
    assert kept == groups
    assert metrics["pass_rate_mean"] == pytest.approx((1 + 0 + 0.5 + 15 / 16) / 4)
    assert metrics["valid_ratio"] == 0.5
    assert metrics["strict_valid_ratio"] == 0.25
    assert metrics["below_1_ratio"] == metrics["above_0_ratio"] == 0.75
    assert metrics["below_15_16_ratio"] == 0.5
    assert metrics["above_1_16_ratio"] == 0.75
    assert pass_rate_calculator([group_of(None)])[1] == {}


def test_reward_filter_keeps_rewards_at_or_above_the_threshold():
    result = reward_filter([group_of(0.5, 0.4, None), group_of(1.0)], threshold=0.5)
    assert rewards_of(result) == [[0.5], [1.0]]
    assert result[1] == {"num_filtered_runs": 2}


def test_reward_filter_keeps_rewards_below_the_threshold_by_rounding():
    kept = rewards_of(reward_filter([group_of(0.3, 0.3 - 1e-6, float("nan"), float("inf"))], threshold=0.1 + 0.2))
    assert kept == [[0.3, float("inf")]]


def test_non_finite_rewards_are_filtered():
    result = invalid_reward_filter([group_of(0.5, float("inf"), None, float("nan"))])
    assert rewards_of(result) == [[0.5]]


def test_reward_std_filter_drops_groups_of_low_deviation():
    groups = [group_of(1, 0), group_of(0.1, 0.1, 0.1), group_of(1.0), group_of(0.5, 0.6), group_of(1, None)]
    result = reward_std_filter(groups, threshold=0.05)
    assert rewards_of(result) == [[1, 0], [], [], [], []]
    assert result[1] == {"num_filtered_groups": 4}
    assert rewards_of(reward_std_filter(groups))[3] == [0.5, 0.6]


def test_outcome_gate_drops_groups_of_equal_outcomes_even_if_rewards_differ():
    metrics = [{"accuracy": 1.0}, {"accuracy": 1.0}]
    shaped_alike = group_of(0.9, 0.7, metrics=metrics)
    differing = group_of(0.9, 0.7, metrics=[{"accuracy": 1.0}, {"accuracy": 0.0}])
    result = outcome_gate([shaped_alike, differing, group_of(1.0, metrics=metrics)], outcome_key="accuracy")
    assert rewards_of(result) == [[], [0.9, 0.7], [1.0]]
    assert rewards_of(outcome_gate([group_of(0.5, 0.6)], tolerance=0.2)) == [[]]


def test_numbers_that_differ_by_rounding_are_equal():
    rounded = [0.1 + 0.2, 0.3, 0.3]
    assert rewards_of(reward_std_filter([group_of(*rounded)])) == [[]]
    assert rewards_of(outcome_gate([group_of(*rounded)])) == [[]]
    assert 0.9 - 0.7 > 0.2
    assert rewards_of(outcome_gate([group_of(0.7, 0.9)], tolerance=0.2)) == [[]]
    assert rewards_of(dapo_dynamic_sampling([group_of(*rounded)], correct_threshold=0.3)) == [[]]
    almost = [0.7 + 0.2 + 0.1, 1.0]
    assert almost[0] < 1 and compute_pass_rates([group_of(*almost)], None) == [1.0]
    assert compute_pass_rates([group_of(0.1 + 0.2 - 0.3, 0.0)], None) == [0.0]
    assert pass_rate_calculator([group_of(*almost)])[1]["valid_ratio"] == 0


def test_dapo_keeps_groups_with_correct_and_incorrect_rollouts():
    groups = [
        group_of(1, 1), group_of(0, 0), group_of(1, 0, None),
        group_of(1, 1, metrics=[{"accuracy": 1.0}, {"accuracy": 0.0}]),
    ]  # fmt: skip
    result = dapo_dynamic_sampling(groups)
    assert rewards_of(result) == [[], [], [1, 0, None], [1, 1]]
    assert result[1] == {"num_filtered_groups": 2}
    assert rewards_of(dapo_dynamic_sampling([group_of(0.4, 0.6)], correct_threshold=0.5)) == [[0.4, 0.6]]


def test_truncated_turns_do_not_train_but_stay_as_context():
    task = Task(task_id="t/0", index=0, row={})
    turns = (turn_of([1], [2, 3], "length"), turn_of([1, 2, 3, 4], [5]))
    run = Trajectory(task=task, run_index=0, turns=turns, reward=1.0)
    masked, metrics = mask_response_truncated([Group(task=task, trajectories=(run,))])
    assert metrics == {"num_masked_turns": 1}
    ((sample,), _) = build_samples(masked, [[0.5]])
    assert sample.token_ids == (1, 2, 3, 4, 5)
    assert sample.is_sampled == (False, False, False, False, True)
    cut = Trajectory(task=task, run_index=0, turns=turns[:1], reward=1.0)
    assert build_samples(mask_response_truncated([Group(task=task, trajectories=(cut,))])[0], [[0.5]])[0] == []


def test_shaping_terms_apply_in_order_and_skipped_ones_are_counted():
    group = group_of(1.0, 2.0, None, metrics=[{"length": 4.0}, {"length": 0.0}, {}])
    configs = [
        {"stats_key": "length", "op_type": "SUB", "weight": 0.1},
        {"stats_key": "length", "op_type": "DIV", "weight": 1.0},
        {"stats_key": "missing", "op_type": "ADD", "weight": 1.0},
    ]
    result = reward_shaping_mapper([group], reward_shaping_configs=configs)
    assert rewards_of(result) == [[pytest.approx(0.6 / 4), 2.0, None]]
    assert result[1]["num_skipped"] == 3
    assert result[1]["reward_diff_min"] == pytest.approx(0.15 - 1.0)
    assert result[1]["reward_diff_max"] == 0.0


def chain_of(*operators, own=(), outcome_key=None, load=None):
    section = ExperienceSection(
        operators=[OperatorSection(name=name, args=args) for name, args in operators], outcome_key=outcome_key
    )
    return build_operators(section, load=load or {}.__getitem__, own=own)


def test_only_a_second_operator_of_the_same_name_is_numbered():
    def reward(groups):
        return groups, {}

    names = ["reward_filter", "my.py:reward", "my.py:reward", "reward_filter"]
    chain = chain_of(*((name, {}) for name in names), load={"my.py:reward": reward}.__getitem__)
    assert [each.name for each in chain] == ["reward_filter", "reward", "reward_2", "reward_filter_2"]


def test_every_operator_builds_with_its_defaults():
    needed = {
        "reward_shaping_mapper": {"reward_shaping_configs": [{"stats_key": "a", "op_type": "MUL", "weight": 2}]},
        "arpo_reward": {"tool_keys": ["a"]},
    }
    names = [name for name in OPERATORS if name != "data_juicer"]  # it asks Data-Juicer: tests/test_data_juicer.py
    assert len(chain_of(*[(name, needed.get(name, {})) for name in names])) == len(names)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("reward_filer", {}, "unknown operator 'reward_filer': did you mean 'reward_filter'"),
        ("reward_filter", {"treshold": 1}, "unknown argument 'treshold'.*did you mean 'threshold'"),
        ("reward_filter", {"threshold": "high"}, "threshold='high'"),
        ("reward_std_filter", {"threshold": -1}, "threshold=-1.*greater than or equal to 0"),
        ("reward_shaping_mapper", {}, "needs the argument 'reward_shaping_configs'"),
        ("reward_shaping_mapper", {"reward_shaping_configs": [{"stats_key": "a"}]}, "Field required"),
        (
            "reward_shaping_mapper",
            {"reward_shaping_configs": [{"stats_key": "a", "op_type": "POW", "weight": 1}]},
            "'ADD', 'SUB', 'MUL' or 'DIV'",
        ),
    ],
)
def test_unknown_names_and_arguments_are_errors(name, args, message):
    with pytest.raises(ConfigError, match=message):
        chain_of((name, args))


def test_a_chain_runs_in_order_and_metrics_carry_operator_names():
    chain = chain_of(("reward_filter", {"threshold": 0.1}), ("reward_std_filter", {}), ("reward_filter", {}))
    groups, metrics = apply_operators([group_of(0.0, 1.0), group_of(1.0, 0.5)], chain)
    assert [[run.reward for run in group.trajectories] for group in groups] == [[], [1.0, 0.5]]
    assert metrics == {
        "experience/reward_filter/num_filtered_runs": 1,
        "experience/reward_std_filter/num_filtered_groups": 1,
        "experience/reward_filter_2/num_filtered_runs": 0,
    }


def test_a_gate_on_shaped_rewards_is_refused():
    shaping = (
        "reward_shaping_mapper",
        {"reward_shaping_configs": [{"stats_key": "a", "op_type": "ADD", "weight": 1.0}]},
    )
    with pytest.raises(ConfigError, match="put it before"):
        chain_of(shaping, ("outcome_gate", {}))
    assert len(chain_of(("outcome_gate", {}), shaping)) == 2
    assert len(chain_of(shaping, ("outcome_gate", {}), outcome_key="accuracy")) == 2


def test_outcome_key_of_the_section_is_the_default_of_operators():
    (gate,) = chain_of(("outcome_gate", {}), outcome_key="accuracy")
    groups, _ = gate.apply([group_of(0, 1, metrics=[{"accuracy": 1.0}, {"accuracy": 1.0}])])
    assert groups[0].trajectories == ()


def test_dapo_uses_the_outcome_key_of_the_section_unless_metric_key_is_set():
    metrics = [{"exact": 1.0, "near": 1.0, "accuracy": 1.0}, {"exact": 0.0, "near": 1.0, "accuracy": 1.0}]
    group = group_of(0.9, 0.8, metrics=metrics)
    for args, outcome_key, num_kept in [({}, None, 0), ({}, "exact", 2), ({"metric_key": "near"}, "exact", 0)]:
        ((kept,), _) = apply_operators([group], chain_of(("dapo_dynamic_sampling", args), outcome_key=outcome_key))
        assert len(kept.trajectories) == num_kept, (args, outcome_key)


@pytest.mark.parametrize(
    ("name", "args", "outcome_key"),
    [
        (
            "reward_shaping_mapper",
            {"reward_shaping_configs": [{"stats_key": "lenght", "op_type": "ADD", "weight": 1.0}]},
            None,
        ),
        ("dapo_dynamic_sampling", {"metric_key": "lenght"}, None),
        ("dapo_dynamic_sampling", {}, "lenght"),
    ],
)
def test_a_metric_that_no_rollout_ever_reported_is_an_error(name, args, outcome_key):
    chain = chain_of((name, args), outcome_key=outcome_key)
    apply_operators([group_of(None)], chain)
    with pytest.raises(ConfigError, match="'lenght', which none of 2 rollouts reports .did you mean 'length'"):
        apply_operators([group_of(1, 0, metrics=[{"length": 1.0}, {"length": 2.0}])], chain)
    with pytest.raises(ConfigError, match=f"operator '{name}' .*they report none"):
        apply_operators([group_of(1, 0)], chain)
    apply_operators([group_of(1, 0, metrics=[{"lenght": 1.0}, {}])], chain)
    apply_operators([group_of(1, 0)], chain)


def test_a_metric_may_be_missing_after_the_first_step_also_where_a_run_resumes():
    shaping = {"reward_shaping_configs": [{"stats_key": "bonus", "op_type": "ADD", "weight": 0.1}]}
    first, second = [group_of(1, 0, metrics=[{"bonus": 1.0}, {}])], [group_of(1, 0)]
    whole, resumed = chain_of(("reward_shaping_mapper", shaping)), chain_of(("reward_shaping_mapper", shaping))
    apply_operators(first, whole, step=1)
    _, metrics = apply_operators(second, whole, step=2)
    assert metrics["experience/reward_shaping_mapper/num_skipped"] == 2
    assert apply_operators(second, resumed, step=2)[1] == metrics


def test_a_custom_operator_gets_outcome_key_only_under_that_name():
    given = []

    def note(groups, *, outcome_key: str | None = None, metric_key: str = "length"):
        given.append((outcome_key, metric_key))
        return groups, {}

    apply_operators([group_of(1)], chain_of(("mine:note", {}), outcome_key="exact", load={"mine:note": note}.get))
    assert given == [("exact", "length")]


def keep_first(groups, *, num_runs: int = 1):
    kept = [Group(task=group.task, trajectories=group.trajectories[:num_runs]) for group in groups]
    return kept, {"mine": 1}


def test_a_custom_operator_is_given_by_path_or_as_an_object():
    by_path = chain_of(("mine:keep_first", {"num_runs": 2}), load={"mine:keep_first": keep_first}.__getitem__)
    groups, metrics = apply_operators([group_of(1, 2, 3)], by_path)
    assert len(groups[0].trajectories) == 2 and metrics == {"experience/keep_first/mine": 1}
    groups, _ = apply_operators([group_of(1, 2, 3)], chain_of(own=[keep_first]))
    assert len(groups[0].trajectories) == 1


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        (lambda groups: (groups[:1], {}), "returned 1 groups for 2"),
        (lambda groups: (groups[::-1], {}), "changed the order"),
        (
            lambda groups: ([Group(task=g.task, trajectories=g.trajectories[::-1]) for g in groups], {}),
            "changed the order",
        ),
        (lambda groups: groups, "must return"),
        (lambda groups: None, "must return"),
        (lambda groups: (groups, {"seen": "many"}), "must return"),
    ],
)
def test_invalid_results_of_a_custom_operator_are_refused(operator, message):
    with pytest.raises(ConfigError, match=message):
        apply_operators([group_of(1, 2, index=0), group_of(3, 4, index=1)], chain_of(own=[operator]))


def test_non_finite_rewards_after_the_chain_are_refused():
    shaping = [{"stats_key": "length", "op_type": "ADD", "weight": float("inf")}]
    chain = [("reward_shaping_mapper", {"reward_shaping_configs": shaping})]
    group = group_of(1, 0, metrics=[{"length": 1.0}, {"length": 2.0}])
    with pytest.raises(ConfigError, match="reward of rollout 0 of task .* inf: .*put invalid_reward_filter last"):
        apply_operators([group], chain_of(*chain))
    groups, _ = apply_operators([group], chain_of(*chain, ("invalid_reward_filter", {})))
    assert groups[0].trajectories == ()


def test_huge_rewards_after_the_chain_are_refused_as_those_of_a_judge():
    shaping = [{"stats_key": "p", "op_type": "DIV", "weight": 1.0}]
    chain = [("reward_shaping_mapper", {"reward_shaping_configs": shaping})]
    group = group_of(1, -1, 1, metrics=[{"p": 1e-170}, {"p": 1e-10}, {"p": 0.5}])
    message = r"reward of rollout 0 of task .* 1e\+170 \(it must be within 1e\+09 of 0\): .*invalid_reward_filter last"
    with pytest.raises(ConfigError, match=message):
        apply_operators([group], chain_of(*chain))
    groups, _ = apply_operators([group], chain_of(*chain, ("invalid_reward_filter", {})))
    assert [run.reward for run in groups[0].trajectories] == [2.0]


def test_a_custom_operator_must_not_change_turns():
    def cut(groups):
        runs = [Trajectory(task=g.task, run_index=0, turns=(), reward=1.0) for g in groups]
        return [Group(task=g.task, trajectories=(run,)) for g, run in zip(groups, runs, strict=True)], {}

    with pytest.raises(ConfigError, match="added, removed or changed turns"):
        apply_operators([group_of(1.0)], chain_of(own=[cut]))


@pytest.mark.parametrize(("op_type", "expected"), [("ADD", 5.0), ("SUB", -1.0), ("MUL", 6.0), ("DIV", 2 / 3)])
def test_rewards_are_shaped_by_each_operation(op_type, expected):
    configs = [{"stats_key": "length", "op_type": op_type, "weight": 1.5}]
    groups = [group_of(2.0, 2.0, metrics=[{"length": 2.0}, {}])]
    (changed,), metrics = reward_shaping_mapper(groups, reward_shaping_configs=configs)
    assert [run.reward for run in changed.trajectories] == [pytest.approx(expected), 2.0]
    assert metrics["num_skipped"] == 1
    assert metrics["reward_diff_mean"] == pytest.approx((expected - 2.0) / 2)


def test_masked_turns_are_counted_over_all_runs():
    cut = turn_of([1], [2], reason="length")
    task = Task(task_id="t/0", index=0, row={})
    runs = tuple(Trajectory(task=task, run_index=index, turns=(cut, cut), reward=1.0) for index in range(2))
    (changed,), metrics = mask_response_truncated([Group(task=task, trajectories=runs)])
    assert [turn.is_trained for run in changed.trajectories for turn in run.turns] == [False] * 4
    assert list(metrics.values()) == [4]


def test_a_deviation_equal_to_the_threshold_is_filtered():
    groups = [group_of(0.0, 1.0)]
    assert [len(group.trajectories) for group in reward_std_filter(groups, threshold=0.5)[0]] == [0]
    assert [len(group.trajectories) for group in reward_std_filter(groups, threshold=0.49)[0]] == [2]
