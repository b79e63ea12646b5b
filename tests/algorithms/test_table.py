"""Names, arguments and defaults of algorithms; what is not known is refused."""

from __future__ import annotations

import pytest

from tunesmith.algorithms.table import ALGORITHMS, compute_group_advantages, resolve_algorithm
from tunesmith.config import AlgorithmSection
from tunesmith.errors import ConfigError
from tunesmith.types import Distribution, Failure, Group, Task, Trajectory, Turn


def test_every_name_resolves_with_its_defaults():
    for name in ALGORITHMS:
        algorithm = resolve_algorithm(AlgorithmSection(algorithm_type=name))
        assert algorithm.name == name
        assert algorithm.aggregation == "token-mean"


def test_partial_arguments_keep_the_other_defaults():
    algorithm = resolve_algorithm(AlgorithmSection(loss_args={"clip_range_high": 0.28}))
    assert algorithm.compute_losses.keywords == {"clip_range_high": 0.28}


def test_aggregation_of_the_section_wins():
    section = AlgorithmSection(loss_aggregation="seq-mean-token-sum")
    assert resolve_algorithm(section).aggregation == "seq-mean-token-sum"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"algorithm_type": "grop"}, "unknown algorithm_type 'grop': did you mean 'grpo'?"),
        ({"advantage_args": {"step_norm": True}}, "unknown argument 'step_norm'.*did you mean 'enable_step_norm'?"),
        ({"advantage_args": {"enable_step_norm": 1}}, "enable_step_norm=1"),
        ({"advantage_args": {"std_cal_level": "groups"}}, "std_cal_level='groups'.*'group' or 'batch'"),
        ({"advantage_args": {"epsilon": 0}}, "epsilon=0.*greater than 0"),
        ({"loss_args": {"clip_range_high": "0.28"}}, "clip_range_high='0.28'"),
        ({"loss_args": {"clip_range_low": -0.1}}, "clip_range_low=-0.1"),
        ({"loss_args": {"scores": 1}}, "unknown argument 'scores'"),
        ({"algorithm_type": "sft", "loss_args": {"beta": 1}}, "it takes none"),
        ({"algorithm_type": "sft", "advantage_args": {"epsilon": 1e-6}}, "computes no advantages"),
    ],
)
def test_unknown_names_and_arguments_are_errors(section, message):
    with pytest.raises(ConfigError, match=message):
        resolve_algorithm(AlgorithmSection(**section))


def build_group(*rewards: float | None) -> Group:
    task = Task(task_id="t/0", index=0, row={})
    turn = Turn(
        prompt_ids=(1,), sampled_ids=(2,), logprobs=(-1.0,), policy_versions=(0,),
        distribution=Distribution(), stop_reason="eos",
    )  # fmt: skip
    failure = Failure(where="judge", message="no verdict")
    runs = [
        Trajectory(task=task, run_index=i, turns=(turn,), reward=reward, failure=failure if reward is None else None)
        for i, reward in enumerate(rewards)
    ]
    return Group(task=task, trajectories=tuple(runs))


def test_groups_are_counted_by_what_becomes_of_them():
    algorithm = resolve_algorithm(AlgorithmSection())
    groups = [build_group(1.0, 0.0, None), build_group(1.0, 1.0), build_group(None, None), build_group(0.5, None)]
    advantages, metrics = compute_group_advantages(algorithm, groups)
    assert [len(row) for row in advantages] == [3, 2, 2, 2]
    assert advantages[1:] == [[None, None], [None, None], [0.0, None]]
    assert metrics == {
        "algorithm/num_trained_groups": 2.0,
        "algorithm/num_dropped_groups": 1.0,
        "algorithm/num_unscored_groups": 1.0,
    }


def test_supervised_algorithm_has_no_advantages():
    with pytest.raises(ConfigError, match="does not learn from rewards"):
        compute_group_advantages(resolve_algorithm(AlgorithmSection(algorithm_type="sft")), [])
