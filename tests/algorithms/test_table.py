"""Names, arguments and defaults of algorithms; unknown ones are refused."""

from __future__ import annotations

import pytest

from tunesmith.algorithms.algorithm import compute_group_advantages, resolve_algorithm
from tunesmith.algorithms.table import ALGORITHMS
from tunesmith.config import AlgorithmSection
from tunesmith.errors import ConfigError
from tunesmith.types import Distribution, Failure, Group, Task, Trajectory, Turn


def test_every_name_resolves_with_its_defaults():
    for name in ALGORITHMS:
        algorithm = resolve_algorithm(AlgorithmSection(algorithm_type=name))
        assert algorithm.name == name
        assert algorithm.aggregation == ALGORITHMS[name].aggregation


def test_partial_arguments_keep_the_other_defaults():
    algorithm = resolve_algorithm(AlgorithmSection(loss_args={"clip_range_high": 0.28}))
    assert algorithm.compute_losses.keywords == {"clip_range_high": 0.28}


def test_loss_aggregation_overrides_the_default():
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
        ({"norm_length": 100}, "norm_length=100 has no effect on 'multi_step_grpo' with loss_aggregation=token-mean"),
        ({"algorithm_type": "opmd", "advantage_args": {"tau": 0.5}}, "tau=0.5 has no effect with baseline='mean'"),
        ({"algorithm_type": "cispo", "loss_args": {"mask_clip_range_low": 0.5}}, "no effect without enable_mask_clip"),
        ({"algorithm_type": "rec", "loss_args": {"epsilon_low": 0.1}}, "no effect with clip_mode='none'"),
        ({"algorithm_type": "rec", "loss_args": {"epsilon_low_prime": 0.1}}, "no effect unless clip_mode='ring'"),
        (
            {"algorithm_type": "rec", "advantage_args": {"epsilon": 1e-3}},
            "epsilon=0.001 has no effect without std_norm",
        ),
        (
            {"algorithm_type": "mix_chord", "terms_args": {"mu_valley": 0.5}},
            "mu_valley=0.5 has no effect with mu_decay",
        ),
        ({"algorithm_type": "rec", "loss_args": {"temp": 2.0}}, "temp=2 has no effect unless weight='advantage'"),
        ({"algorithm_type": "rec", "loss_args": {"regularizer_coef": 0.1}}, "regularizer='none' with .*set both"),
        ({"terms_args": {"gamma": 1.0}}, "unknown argument 'gamma' in terms_args of 'multi_step_grpo'.*it takes none"),
        ({"algorithm_type": "topr", "terms_args": {"advantage_treshold": 1.0}}, "did you mean 'advantage_threshold'"),
        ({"algorithm_type": "sft", "loss_args": {"beta": 1}}, "it takes none"),
        ({"algorithm_type": "dpo", "loss_aggregation": "token-mean"}, "loss_aggregation has no effect with 'dpo'"),
        ({"algorithm_type": "sft", "top_entropy_fraction": 0.2}, "top_entropy_fraction=0.2 has no effect with 'sft'"),
        ({"algorithm_type": "dppo"}, "unknown algorithm_type 'dppo': did you mean 'dppo_tv' or 'dppo_kl'?"),
        ({"algorithm_type": "dppo_tv", "loss_args": {"delta_low": 1.5}}, "delta_low=1.5"),
        ({"algorithm_type": "clip_cov", "terms_args": {"fraction": 0.0}}, "fraction=0.0"),
        (
            {"algorithm_type": "rloo", "terms_args": {"reward_kl_coef": "a"}},
            "reward_kl_coef='a' in terms_args of 'rloo'",
        ),
        (
            {"algorithm_type": "topr", "correction": {"floor": 0.5}},
            "correction.floor=0.5 has no effect on 'topr' with importance='auto'",
        ),
        ({"correction": {"importance": "none", "floor": 0.5}}, "correction.floor=0.5 has no effect"),
        ({"algorithm_type": "sft", "advantage_args": {"epsilon": 1e-6}}, "computes no advantages"),
        (
            {"algorithm_type": "pass_at_k", "advantage_args": {"k": 8}},
            "k=8 of 'pass_at_k' must be below .*group_size=8",
        ),
        ({"algorithm_type": "pass_at_k", "group_size": 4}, "k=4 of 'pass_at_k' must be below"),
        ({"algorithm_type": "pass_at_k", "advantage_args": {"k": 0}}, "k=0"),
        ({"algorithm_type": "gdpo", "advantage_args": {"rewards": {}}}, "finite weights other than 0"),
        ({"algorithm_type": "gdpo", "advantage_args": {"rewards": ["accuracy"]}}, "rewards=.*dictionary"),
        ({"algorithm_type": "dpo", "terms_args": {"loss_type": "exo"}}, "loss_type='exo'"),
        ({"algorithm_type": "dpo", "terms_args": {"loss_type": "robust"}}, "label_smoothing=0: set label_smoothing"),
        ({"algorithm_type": "dpo", "terms_args": {"label_smoothing": 0.5}}, "label_smoothing=0.5.*less than 0.5"),
        (
            {"algorithm_type": "dpo", "terms_args": {"loss_type": "ipo", "label_smoothing": 0.1}},
            "label_smoothing=0.1 has no effect with loss_type='ipo'",
        ),
        ({"reference_refresh_steps": 10}, "reference_refresh_steps=10 has no effect on 'multi_step_grpo' without a KL"),
    ],
)
def test_unknown_names_and_arguments_are_errors(section, message):
    with pytest.raises(ConfigError, match=message):
        resolve_algorithm(AlgorithmSection(**section))


@pytest.mark.parametrize(
    ("section", "needs"),
    [
        ({"algorithm_type": "grpo"}, set()),
        ({"algorithm_type": "grpo", "kl_coef": 0.1}, {"reference"}),
        ({"algorithm_type": "gspo"}, {"logprobs"}),
        ({"algorithm_type": "rec"}, set()),
        ({"algorithm_type": "rec", "loss_args": {"clip_mode": "gspo-one-side"}}, {"logprobs"}),
        ({"algorithm_type": "rec", "loss_args": {"weight": "gspo_importance_sampling"}}, {"logprobs"}),
        ({"algorithm_type": "rloo", "terms_args": {"reward_kl_coef": 0.1}}, {"reference"}),
        ({"algorithm_type": "rloo", "terms_args": {"reward_kl_coef": 0.0}}, set()),
        ({"correction": {"negative_sequence_delta": 0.1}}, {"logprobs"}),
        ({"algorithm_type": "dppo_tv"}, set()),
        ({"algorithm_type": "kl_cov"}, {"logprobs"}),
        ({"algorithm_type": "aepo"}, {"entropies"}),
        ({"algorithm_type": "rec", "top_entropy_fraction": 0.2}, {"entropies"}),
        ({"algorithm_type": "gmpo", "top_entropy_fraction": 0.2}, {"logprobs", "entropies"}),
        ({"algorithm_type": "dpo"}, {"logprobs", "reference"}),
        ({"algorithm_type": "orpo"}, {"logprobs"}),
        ({"algorithm_type": "simpo"}, {"logprobs"}),
        ({"algorithm_type": "gdpo"}, {"reward_parts"}),
    ],
)
def test_needs_follow_from_arguments(section, needs):
    assert resolve_algorithm(AlgorithmSection(**section)).needs == needs


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


@pytest.mark.parametrize(
    "name",
    ["multi_step_grpo", "rloo", "bnpo", "rec", "opo", "maxrl", "gdpo", "reinforceplusplus_baseline"],
)
def test_group_relative_algorithms_refuse_group_size_one(name):
    with pytest.raises(ConfigError, match="group_size=1: .* one rollout has no advantage; raise group_size"):
        resolve_algorithm(AlgorithmSection(algorithm_type=name, group_size=1))


@pytest.mark.parametrize("name", ["reinforce", "raft", "asymre", "remax", "ppo", "mix", "gigpo"])
def test_algorithms_without_group_baseline_accept_group_size_one(name):
    assert resolve_algorithm(AlgorithmSection(algorithm_type=name, group_size=1)).name == name


def test_trained_dropped_and_unscored_groups_are_counted():
    algorithm = resolve_algorithm(AlgorithmSection())
    groups = [build_group(1.0, 0.0, None), build_group(1.0, 1.0), build_group(None, None), build_group(0.5, None)]
    advantages, metrics = compute_group_advantages(algorithm, groups)
    assert [len(row) for row in advantages] == [3, 2, 2, 2]
    assert advantages[1:] == [[None, None], [None, None], [None, None]]
    assert metrics == {
        "algorithm/num_trained_groups": 1.0,
        "algorithm/num_dropped_groups": 2.0,
        "algorithm/num_unscored_groups": 1.0,
    }


def test_gigpo_advantages_are_per_turn():
    """Two rollouts of one call each in the same state: both parts are equal."""
    advantages, metrics = compute_group_advantages(
        resolve_algorithm(AlgorithmSection(algorithm_type="gigpo")), [build_group(1.0, 0.0)]
    )
    assert advantages == [[pytest.approx((1.0,), abs=1e-5), pytest.approx((-1.0,), abs=1e-5)]]
    assert metrics["algorithm/num_trained_groups"] == 1


def test_supervised_algorithm_has_no_advantages():
    with pytest.raises(ConfigError, match="does not train on rewards"):
        compute_group_advantages(resolve_algorithm(AlgorithmSection(algorithm_type="sft")), [])


REWARDED = [name for name in ALGORITHMS if ALGORITHMS[name].compute_advantages is not None]


def build_uneven(*, has_tokens: bool) -> list[Group]:
    """Groups of five rollouts, more of which fail than succeed, with unequal lengths and probabilities."""
    groups = []
    for number in range(6):
        task, runs = Task(task_id=f"t/{number}", index=number, row={}), []
        for run_index in range(5):
            size = (3 + 2 * run_index) * has_tokens
            turn = Turn(
                prompt_ids=(7, run_index % 2) * has_tokens,
                sampled_ids=(1,) * size,
                logprobs=(-0.1 * number - 0.3 * (run_index % 3),) * size,
                policy_versions=(0,) * size,
                distribution=Distribution(),
                stop_reason="eos",
            )
            turns, reward = (turn,) * (1 + run_index % 2), float(run_index > 3 - number % 2)
            runs.append(
                Trajectory(task=task, run_index=run_index, turns=turns, reward=reward, metrics={"a": reward, "b": 0.0})
            )
        groups.append(Group(task=task, trajectories=tuple(runs), baseline_reward=0.25))
    return groups


@pytest.mark.parametrize("name", REWARDED)
def test_advantages_that_read_no_tokens_follow_from_rewards(name):
    arguments = {"rewards": {"a": 1.0, "b": 0.5}} if name == "gdpo" else {}
    arguments |= {"drop": "balance"} if name == "rec" else {}
    algorithm = resolve_algorithm(AlgorithmSection(algorithm_type=name, group_size=5, advantage_args=arguments))
    found, expected = (
        compute_group_advantages(algorithm, build_uneven(has_tokens=has_tokens)) for has_tokens in (False, True)
    )
    assert (found == expected) == (not algorithm.reads_tokens)


def test_own_advantages_and_the_rank_penalty_may_read_tokens():
    assert resolve_algorithm(AlgorithmSection(algorithm_type="grpo", advantage_args={"rank_penalty": 0.1})).reads_tokens
    assert not resolve_algorithm(
        AlgorithmSection(algorithm_type="grpo", advantage_args={"rank_penalty": 0.0})
    ).reads_tokens
    section = AlgorithmSection(advantage="agent.py:shape")
    functions = {"algorithm.advantage": lambda groups: [[0.0 for _ in group] for group in groups]}
    assert resolve_algorithm(section, functions=functions).reads_tokens
