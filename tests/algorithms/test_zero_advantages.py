"""Groups with identical rewards are dropped, or trained where a KL, entropy bonus or regularizer has a gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_table import build_group

from token_batches import build_scores
from tunesmith.algorithms.algorithm import compute_group_advantages, has_advantage, resolve_algorithm
from tunesmith.algorithms.sequence_terms import compute_rloo_terms
from tunesmith.config import AlgorithmSection
from tunesmith.types import Group

REWARD_KL = {"algorithm_type": "rloo", "terms_args": {"reward_kl_coef": 0.1}}


def compute(section: dict, *groups: Group):
    return compute_group_advantages(resolve_algorithm(AlgorithmSection(**section)), groups)


@pytest.mark.parametrize(
    "section",
    [
        {"kl_coef": 0.1},
        {"entropy_coef": 0.01},
        {"algorithm_type": "grpo", "kl_coef": 0.1, "advantage_args": {"std_threshold": 0.0}},
        REWARD_KL,
        {"algorithm_type": "rec", "loss_args": {"regularizer": "k2", "regularizer_coef": 0.1}},
        {"algorithm_type": "dppo_tv", "loss_args": {"regularizer_coef": 1e-3}},
        {"algorithm_type": "gigpo", "kl_coef": 0.1},
        {"algorithm_type": "mix", "kl_coef": 0.1},
        {"algorithm_type": "maxrl", "kl_coef": 0.1},
        {"algorithm_type": "opo", "entropy_coef": 0.01},
        {"algorithm_type": "reinforceplusplus_baseline", "kl_coef": 0.1},
        {"algorithm_type": "pass_at_k", "kl_coef": 0.1, "advantage_args": {"k": 1}},
    ],
)
def test_zero_advantage_groups_train_with_another_gradient(section):
    groups = [build_group(1.0, 1.0, None), build_group(0.5, None), build_group(None, None), build_group(1.0, 0.0)]
    advantages, metrics = compute(section, *groups)
    assert advantages[:3] == [[0.0, 0.0, None], [0.0, None], [None, None]]
    assert all(advantages[3])
    assert metrics == {
        "algorithm/num_trained_groups": 3.0,
        "algorithm/num_dropped_groups": 0.0,
        "algorithm/num_unscored_groups": 1.0,
        "algorithm/num_zero_advantage_groups": 2.0,
    }


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"algorithm_type": "rloo"},
        {"algorithm_type": "gigpo"},
        {"algorithm_type": "maxrl"},
        {"algorithm_type": "opo"},
        {"algorithm_type": "reinforceplusplus_baseline"},
        {"algorithm_type": "pass_at_k"},
        {"algorithm_type": "grpo", "kl_coef": 0.1, "advantage_args": {"std_threshold": 0.1}},
    ],
)
def test_zero_advantage_groups_are_dropped_without_one_or_by_std_threshold(section):
    advantages, metrics = compute(section, build_group(1.0, 1.0))
    assert advantages == [[None, None]] and metrics["algorithm/num_dropped_groups"] == 1


ROUNDED = 0.1 + 0.2
"""0.30000000000000004."""


@pytest.mark.parametrize("offset", [0.0, -0.3], ids=["0.3", "0"])
@pytest.mark.parametrize(
    "name",
    [
        "grpo", "multi_step_grpo", "dr_grpo", "bnpo", "maxrl", "rloo", "opo", "opmd", "rec", "gigpo", "remax",
        "reinforceplusplus_baseline",
    ],
)  # fmt: skip
def test_rewards_that_differ_by_rounding_are_equal(name, offset):
    group = replace(build_group(ROUNDED + offset, 0.3 + offset, 0.3 + offset), baseline_reward=0.3 + offset)
    assert ROUNDED + offset != 0.3 + offset
    advantages, metrics = compute({"algorithm_type": name}, group)
    assert advantages == [[None, None, None]] and metrics["algorithm/num_dropped_groups"] == 1
    assert not has_advantage(resolve_algorithm(AlgorithmSection(algorithm_type=name)), group)


def test_small_differences_of_rewards_count():
    (row,), _ = compute({"algorithm_type": "dr_grpo"}, build_group(0.3, 0.3 + 1e-6))
    assert row == pytest.approx([-5e-7, 5e-7])
    (row,), _ = compute({"algorithm_type": "dr_grpo"}, build_group(1e-6, 3e-6))
    assert row == pytest.approx([-1e-6, 1e-6])


def test_options_of_the_advantages_follow_the_same_rule():
    parts = [{"one": ROUNDED, "two": 1.0}, {"one": 0.3, "two": 1.0}]
    group = build_group(1.0, 1.0)
    runs = tuple(replace(run, metrics=each) for run, each in zip(group.trajectories, parts, strict=True))
    gdpo = {"algorithm_type": "gdpo", "advantage_args": {"rewards": {"one": 1.0, "two": 0.5}}}
    assert compute(gdpo, replace(group, trajectories=runs))[0] == [[None, None]]
    opposite = [{"one": 0.1, "two": 0.9}, {"one": 0.2, "two": 0.8}, {"one": 0.7, "two": 0.3}]  # their sums are all 1
    runs = tuple(
        replace(run, metrics=each) for run, each in zip(build_group(1, 1, 1).trajectories, opposite, strict=True)
    )
    gdpo = {"algorithm_type": "gdpo", "advantage_args": {"rewards": {"one": 1.0, "two": 1.0}}}
    assert compute(gdpo, replace(group, trajectories=runs))[0] == [[None, None, None]]
    # the best rollouts of raft, and those below the mean for RED-Drop, which here are none of the three in the middle
    assert compute({"algorithm_type": "raft"}, build_group(ROUNDED, 0.3, 0.1))[0] == [[1.0, 1.0, None]]
    balanced = {"algorithm_type": "rec", "advantage_args": {"drop": "balance"}}
    assert None not in compute(balanced, build_group(0.1, 0.3, 0.3, ROUNDED, 0.5))[0][0]


def test_rollouts_without_advantage_by_selection_stay_dropped():
    """raft selects rollouts, which zero advantages do not change; a failed greedy rollout is no baseline of 0."""
    assert compute({"algorithm_type": "raft", "kl_coef": 0.1}, build_group(0.0, 0.0))[0] == [[None, None]]
    section = {"algorithm_type": "remax", "kl_coef": 0.1}
    group = build_group(1.0, 1.0)
    assert compute(section, group)[0] == [[None, None]]
    equal = Group(task=group.task, trajectories=group.trajectories, baseline_reward=1.0)
    assert compute(section, equal)[0] == [[0.0, 0.0]]


def test_has_advantage_ignores_the_kl():
    algorithm = resolve_algorithm(AlgorithmSection(kl_coef=0.1))
    assert not has_advantage(algorithm, build_group(1.0, 1.0))
    assert has_advantage(algorithm, build_group(1.0, 0.0))


@pytest.mark.parametrize(
    ("section", "rewards", "expected"),
    [
        ({"algorithm_type": "reinforce"}, (0.0, 0.0, None), False),
        ({"algorithm_type": "reinforce"}, (0.0, 1.0), True),
        ({"algorithm_type": "reinforce"}, (1.0, 1.0), True),
        ({"algorithm_type": "topr", "advantage_args": {"baseline": 0.3}}, (0.1 + 0.2, 0.3), False),
        ({"algorithm_type": "asymre", "advantage_args": {"baseline_shift": 0.0}}, (0.7, 0.7), False),
        ({"algorithm_type": "asymre"}, (0.7, 0.7), True),
        ({"algorithm_type": "reinforceplusplus"}, (0.0, 0.0), True),
        ({"algorithm_type": "on_policy_distill", "teacher": {"path": "teacher"}}, (0.0, 0.0), True),
        ({"algorithm_type": "on_policy_distill", "teacher": {"path": "teacher"}}, (None, None), False),
    ],
)
def test_groups_whose_advantages_are_all_zero_have_none_unless_terms_compute_them(section, rewards, expected):
    """Dynamic sampling replaces such groups, but without it they stay in the mean over sequences."""
    algorithm, group = resolve_algorithm(AlgorithmSection(**section)), build_group(*rewards)
    assert has_advantage(algorithm, group) is expected
    assert compute(section, group)[1]["algorithm/num_trained_groups"] == any(reward is not None for reward in rewards)


def test_a_group_without_a_turn_that_is_trained_has_no_advantage():
    """An operator has excluded its tokens, as those of replies that were cut off: nothing of it can be trained."""
    algorithm, group = resolve_algorithm(AlgorithmSection()), build_group(1.0, 0.0)

    def exclude(run):
        return replace(run, turns=tuple(replace(turn, is_trained=False) for turn in run.turns))

    assert has_advantage(
        algorithm, replace(group, trajectories=(exclude(group.trajectories[0]), group.trajectories[1]))
    )
    assert not has_advantage(algorithm, group.map(exclude))


def test_equal_rewards_with_unequal_kl_have_advantages():
    """R - 0.1 KL with KLs of 1 and 3, each minus the other: +0.2 and -0.2."""
    (row,), _ = compute(REWARD_KL, build_group(1.0, 1.0))
    scores = build_scores(
        [[row[0]], [row[1], row[1]]], groups=[0, 0], reference_logprobs=[[-1.0], [-2.0, -1.0]]
    )  # the sampler's logprobs are 0
    np.testing.assert_allclose(compute_rloo_terms(scores, reward_kl_coef=0.1).advantages_E, [0.2, -0.2, -0.2])


def test_gdpo_drops_groups_by_their_metrics_not_by_the_reward():
    """Equal rewards of unequal parts are trained; equal parts are dropped, or trained with a KL."""

    def build(*parts: tuple[float, float]) -> Group:
        group = build_group(*(1.0 for _ in parts))
        runs = [
            replace(run, metrics={"one": one, "two": two})
            for run, (one, two) in zip(group.trajectories, parts, strict=True)
        ]
        return replace(group, trajectories=tuple(runs))

    section = {"algorithm_type": "gdpo", "advantage_args": {"rewards": {"one": 1.0, "two": 0.5}}}
    groups = [build((1.0, 0.0), (0.0, 1.0)), build((1.0, 0.5), (1.0, 0.5))]
    advantages, metrics = compute(section, *groups)
    assert advantages[0][0] == -advantages[0][1] > 0 and advantages[1] == [None, None]
    assert metrics["algorithm/num_dropped_groups"] == 1
    assert has_advantage(resolve_algorithm(AlgorithmSection(**section)), groups[0])
    assert compute({**section, "kl_coef": 0.1}, *groups)[0][1] == [0.0, 0.0]
