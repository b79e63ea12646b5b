"""The parts of Trinity-RFT's algorithms select entries of our table, with their arguments, or are refused."""

from __future__ import annotations

import pytest
import yaml

from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.algorithms.table import ALGORITHMS
from tunesmith.commands.settings import describe
from tunesmith.compat.trinity_algorithms import PARTS, TERMS_ARGS
from tunesmith.compat.trinity_yaml import translate_trinity_file
from tunesmith.config import RunConfig
from tunesmith.errors import ConfigError
from tunesmith.runs.load_config import build_section


def read(**algorithm):
    """Our algorithm section for a file with these keys."""
    return build_section(
        RunConfig, translate_trinity_file({"buffer": {}, "model": {"model_path": "m"}, "algorithm": algorithm}).values
    ).algorithm


def test_every_algorithm_is_in_our_table_and_resolves_with_defaults():
    assert set(PARTS) <= set(ALGORITHMS)
    assert set(TERMS_ARGS) <= set(PARTS)
    for name in PARTS:
        section = read(algorithm_type=name)
        assert resolve_algorithm(section).name == name


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"algorithm_type": "grpo", "policy_loss_fn": "gspo"}, "gspo"),
        ({"algorithm_type": "dapo", "policy_loss_fn": "ppo", "advantage_fn": "grpo"}, "dapo"),
        ({"algorithm_type": "ppo", "advantage_fn": "grpo"}, "grpo"),
        ({"algorithm_type": "multi_step_grpo", "advantage_fn": "step_wise_grpo"}, "multi_step_grpo"),
        ({"algorithm_type": "multi_step_grpo", "advantage_fn": "multi_step_grpo"}, "multi_step_grpo"),
        ({"algorithm_type": "rec", "advantage_fn": "opmd", "policy_loss_fn": "sppo"}, "sppo"),
        ({"algorithm_type": "grpo", "policy_loss_fn": "sapo", "advantage_fn": None}, "sapo"),
    ],
)
def test_exchanged_parts_select_the_algorithm_that_has_them(keys, expected):
    assert read(**keys).algorithm_type == expected
    assert read(**dict(reversed(keys.items()))).algorithm_type == expected


GIVEN = [
    ("opmd", "advantage_fn_args", {"opmd_baseline": "logavgexp", "tau": 0.5}, {"baseline": "logavgexp", "tau": 0.5}),
    ("opmd", "policy_loss_fn_args", {"tau": 2.0}, {"tau": 2.0}),
    ("asymre", "policy_loss_fn_args", {"tau": 1.0}, {"tau": 1.0}),
    ("asymre", "advantage_fn_args", {"baseline_shift": -0.2}, {"baseline_shift": -0.2}),
    ("topr", "policy_loss_fn_args", {"advantage_threshold": 0.5}, {}),
    ("rec", "advantage_fn_args", {"std_normalize": True, "drop": ""}, {"std_normalize": True}),
    ("rec", "policy_loss_fn_args", {"weight": "advantage", "temp": 2.0}, {"weight": "advantage", "temp": 2.0}),
    ("gspo", "policy_loss_fn_args", {"clip_range": 0.01}, {"clip_range_low": 0.01, "clip_range_high": 0.01}),
    (
        "ppo",
        "policy_loss_fn_args",
        {"clip_range": 0.3, "clip_range_low": None, "clip_range_high": 0.4},
        {"clip_range_low": 0.3, "clip_range_high": 0.4},
    ),
    ("cispo", "policy_loss_fn_args", {"enable_mask_clip": True}, {"enable_mask_clip": True}),
    ("sapo", "policy_loss_fn_args", {"tau_neg": 1.1}, {"tau_neg": 1.1}),
    ("sppo", "policy_loss_fn_args", {"epsilon": 0.2}, {"epsilon": 0.2}),
    ("gigpo", "advantage_fn_args", {"gamma": 0.9, "fnorm": "std"}, {"gamma": 0.9, "fnorm": "std"}),
    ("grpo", "advantage_fn_args", {"rank_penalty": 0.25}, {"rank_penalty": 0.25}),
    ("grpo", "policy_loss_fn_args", {"fallback_to_policy_gradient": True}, {"fallback_to_policy_gradient": True}),
]


@pytest.mark.parametrize(("name", "key", "args", "expected"), GIVEN)
def test_arguments_reach_the_function_that_has_them(name, key, args, expected):
    section = read(algorithm_type=name, **{key: args})
    target = "advantage_args" if key == "advantage_fn_args" else "loss_args"
    assert getattr(section, target) == expected
    resolve_algorithm(section)


def test_an_argument_of_the_loss_may_be_in_terms_args():
    section = read(algorithm_type="topr", policy_loss_fn_args={"advantage_threshold": 0.5})
    assert section.terms_args == {"advantage_threshold": 0.5, "ratio_level": "token"}
    resolve_algorithm(section)


def test_a_kl_in_the_reward_is_for_algorithms_whose_papers_have_it():
    section = read(algorithm_type="rloo", kl_penalty_fn="k1", kl_penalty_fn_args={"kl_coef": 0.05, "adaptive": False})
    assert section.terms_args == {"reward_kl_coef": 0.05}
    assert "reference" in resolve_algorithm(section).needs
    assert read(algorithm_type="rloo", kl_penalty_fn="k1").terms_args == {"reward_kl_coef": 0.001}
    assert read(algorithm_type="grpo", kl_penalty_fn="none", kl_penalty_fn_args={"kl_coef": 0.1}).terms_args == {}
    with pytest.raises(ConfigError, match=r"kl_penalty_fn='k2'.*estimated by k1"):
        read(algorithm_type="rloo", kl_penalty_fn="k2")
    with pytest.raises(ConfigError, match=r"kl_penalty_fn_args.adaptive=True.*constant"):
        read(algorithm_type="rloo", kl_penalty_fn="k1", kl_penalty_fn_args={"adaptive": True})


def test_a_kl_of_weight_zero_needs_no_estimator():
    section = read(algorithm_type="grpo", kl_loss_fn="low_var_kl", kl_loss_fn_args={"kl_coef": 0.0})
    assert (section.kl_coef, resolve_algorithm(section).needs) == (0.0, frozenset())


def test_an_unknown_argument_is_refused_when_the_algorithm_is_resolved():
    section = read(algorithm_type="multi_step_grpo", advantage_fn_args={"enable_stepnorm": True})
    with pytest.raises(ConfigError, match="did you mean 'enable_step_norm'"):
        resolve_algorithm(section)


@pytest.mark.parametrize(
    ("algorithm", "args", "message"),
    [
        ("ppo", {"nonsense": 3}, "unknown argument 'nonsense' in loss_args of 'ppo'"),
        ("ppo", {"clip_range": "abc"}, "clip_range_low='abc' in loss_args of 'ppo': Input should be a valid number"),
        ("mix_chord", {"enable_phi_function": False, "nonsense": 3}, "unknown argument 'nonsense' in loss_args of "),
        ("dpo", {"beta": "abc"}, "beta='abc' in terms_args of 'dpo': Input should be a valid number"),
    ],
)
def test_a_translated_file_is_refused_for_the_arguments_that_training_refuses(tmp_path, algorithm, args, message):
    values = {"buffer": {}, "model": {"model_path": "m"}}
    values["algorithm"] = {"algorithm_type": algorithm, "policy_loss_fn_args": args}
    if algorithm == "dpo":
        rows = {"storage_type": "file", "path": "rows.jsonl"}
        values |= {"mode": "train", "buffer": {"trainer_input": {"experience_buffer": rows}}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=message):
        describe(str(tmp_path / "run.yaml"), stage="prefer" if algorithm == "dpo" else "tune")
