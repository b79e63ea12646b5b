"""Config sections: unknown keys, knobs without effect and values out of range are errors."""

from __future__ import annotations

from typing import Literal, get_args, get_origin

import pytest
from pydantic import ValidationError

from tunesmith.config import (
    AlgorithmSection,
    AuxiliaryModelSection,
    CriticSection,
    EngineSection,
    PreferenceConfig,
    RunConfig,
    Section,
    SftConfig,
    SftTrainerSection,
    ToolSection,
    TrainerSection,
)
from tunesmith.config.section import Needs, Unused
from tunesmith.errors import ConfigError
from tunesmith.runs.load_config import describe_options, find_section, load_section


def iter_sections(section: type[Section] = Section):
    for inner in section.__subclasses__():
        yield inner
        yield from iter_sections(inner)


def test_only_the_model_path_is_required():
    config = RunConfig.model_validate({"model": {"path": "m"}})
    assert config.model.path == "m"
    assert config.train_dataset is None


def test_every_knob_has_a_description():
    bare = [f"{s.__name__}.{name}" for s in iter_sections() for name, f in s.model_fields.items() if not f.description]
    sections = {field for section in iter_sections() for field in section.model_fields}
    holders = {"model", "train_dataset", "auxiliary_models", "algorithm", "engine", "rollout", "trainer", "evaluation"}
    assert holders <= sections
    assert {name.split(".")[1] for name in bare} <= holders | {"monitor"}


def list_types(annotation) -> list[str]:
    """Names of the types in an annotation; the values of a literal count as their types."""
    if get_origin(annotation) is Literal:
        return [type(value).__name__ for value in get_args(annotation)]
    inner = get_args(annotation)
    return [getattr(annotation, "__name__", "")] if not inner else [name for each in inner for name in list_types(each)]


def test_every_number_refuses_a_boolean():
    """YAML reads `yes`, `no`, `on` and `off` as booleans, which Python takes for 1 and 0."""
    numbers = [
        (section, name)
        for section in iter_sections()
        for name, field in section.model_fields.items()
        if {"int", "float"} & set(list_types(field.annotation)) and "bool" not in list_types(field.annotation)
    ]
    assert len(numbers) > 150
    for section, name in numbers:
        for value in (True, False, [True, 2], {"a": True}):
            with pytest.raises(ValidationError) as refused:
                section.model_validate({name: value})
            assert f"{name}={value} is a boolean" in refused.value.errors()[0]["msg"], (section, name, value)


def test_a_number_that_is_a_boolean_is_named_with_its_cause():
    with pytest.raises(ConfigError) as refused:
        load_section(RunConfig, None, ["model.path=m", "algorithm.batch_size=yes", "trainer.betas=[no, 0.9]"])
    cause = "is a boolean where a number is expected (YAML reads yes, no, on and off as booleans)"
    assert str(refused.value) == f"algorithm: batch_size=True {cause}; trainer: betas=[False, 0.9] {cause}"


def test_the_error_of_an_unknown_key_suggests_the_nearest_key():
    with pytest.raises(ValidationError, match="unknown key batchsize: did you mean 'batch_size'"):
        AlgorithmSection.model_validate({"batchsize": 3})


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (TrainerSection, {"min_lr_ratio": 0.1}, "min_lr_ratio=0.1 has no effect with schedule=constant"),
        (EngineSection, {"kv_cache_tokens": 64, "kv_cache_gib": 1}, "kv_cache_tokens and kv_cache_gib are both given"),
        (EngineSection, {"weight_format": "fp8", "cuda_decode": "graphs"}, "fp8 needs cuda_decode=compiled, and it is"),
        (
            RunConfig,
            {"model": {"path": "m", "lora": {}}, "engine": {"weight_format": "fp8"}},
            "weight_format=fp8 copies whole weights, not adapters",
        ),
        (AuxiliaryModelSection, {"path": "m", "api_key_env": "KEY"}, "api_key_env=KEY has no effect without base_url"),
        (
            AuxiliaryModelSection,
            {"path": "m", "base_url": "u", "tool_call_parser": "none"},
            "tool_call_parser=none has no",
        ),
        (AlgorithmSection, {"kl_estimator": "k3"}, "kl_estimator=k3 has no effect with kl_coef=0: set kl_coef above 0"),
        (AlgorithmSection, {"kl_adaptive": {"target": 0.1}}, "kl_adaptive has no effect with kl_coef=0"),
        (
            RunConfig,
            {"model": {"path": "m"}, "algorithm": {"critic": {"clip_range": 0.1}}},
            "algorithm.critic.clip_range=0.1 has no effect with trainer.num_minibatches=1 .*num_epochs above 1",
        ),
        (SftTrainerSection, {"warmup_steps": 2, "warmup_ratio": 0.1}, "warmup_steps=2 and warmup_ratio=0.1"),
        (TrainerSection, {"warmup_steps": 2, "warmup_ratio": 0.1}, "warmup_steps=2 and warmup_ratio=0.1"),
        (RunConfig, {"model": {"path": "m", "lora": {"dropout": 0.1}}}, "model.lora.dropout=0.1 is for supervised"),
        (
            PreferenceConfig,
            {"model": {"path": "m", "lora": {"dropout": 0.1}}, "train_dataset": {"path": "d"}},
            "model.lora.dropout=0.1 is for supervised fine-tuning: preference training compares",
        ),
        (
            SftConfig,
            {"model": {"path": "m", "lora": {}}, "train_dataset": {"path": "d"}, "evaluation_interval_steps": 5},
            "evaluation_interval_steps=5 has no effect without eval_dataset .*held-out rows.*: set eval_dataset or",
        ),
    ],
)
def test_a_knob_without_effect_is_refused(section, values, message):
    with pytest.raises(ValidationError, match=message):
        section.model_validate(values)


def test_a_condition_names_the_knob_its_value_and_the_way_out():
    with pytest.raises(ValidationError) as raised:
        TrainerSection(schedule="constant", min_lr_ratio=0.1)
    message = "min_lr_ratio=0.1 has no effect with schedule=constant: set schedule=cosine, or leave out min_lr_ratio"
    assert message in str(raised.value)


def test_a_condition_may_be_met_in_one_of_several_ways():
    values = {"model": {"path": "m", "lora": {}}, "train_dataset": {"path": "d"}, "early_stopping": {}}
    with pytest.raises(ValidationError, match="set eval_dataset or eval_fraction above 0, or leave out early_stopping"):
        SftConfig.model_validate(values)
    for held_out in ({"eval_dataset": {"path": "e"}}, {"eval_fraction": 0.1}):
        assert SftConfig.model_validate(values | held_out).early_stopping is not None
    never = values | {"eval_fraction": 0.1, "evaluation_interval_steps": 0}
    with pytest.raises(ValidationError, match="early_stopping has no effect with evaluation_interval_steps=0"):
        SftConfig.model_validate(never)


def test_a_knob_of_a_section_may_need_one_of_another_section():
    values = {"model": {"path": "m"}, "evaluation": {"num_samples": 4}}
    message = r"evaluation.num_samples=4 has no effect without eval_datasets \(there are no held-out tasks\)"
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate(values)
    assert RunConfig.model_validate(values | {"eval_datasets": {"t": {"path": "d"}}}).evaluation.num_samples == 4
    needs = {option.key: option.needs for option in describe_options(RunConfig)}
    assert needs["evaluation.num_samples"] == needs["callbacks.on_evaluation"] == "eval_datasets"
    assert needs["evaluation.interval_steps"] == ""
    assert "algorithm.correction.importance=token|sequence|none" in needs["algorithm.correction.cap"]


def test_a_knob_that_is_null_or_at_its_default_needs_nothing():
    assert CriticSection(clip_range=None).clip_range is None
    assert TrainerSection(min_lr_ratio=0.0).schedule == "constant"


@pytest.mark.parametrize("section", list(iter_sections()), ids=lambda section: section.__name__)
def test_conditions_name_knobs_of_their_section(section):
    for name, field in section.model_fields.items():
        for condition in field.metadata:
            if isinstance(condition, Needs):
                assert condition.knob.split(".")[0] in set(section.model_fields) - {name}
            if isinstance(condition, Unused):
                held, _ = find_section(field.annotation)
                assert {path.split(".")[0] for path in condition.knobs} <= set(held.model_fields)


@pytest.mark.parametrize(
    "several", [{"trainer": {"num_minibatches": 2}}, {"algorithm": {"critic": {"num_epochs": 2, "clip_range": 0.1}}}]
)
def test_values_are_clipped_where_the_critic_has_several_updates_in_a_step(several):
    values = {"model": {"path": "m"}, "algorithm": {"critic": {"clip_range": 0.1}}}
    assert RunConfig.model_validate(values | several).algorithm.critic.clip_range == 0.1


@pytest.mark.parametrize(("bound", "value"), [("cap", 3.0), ("floor", 0.5)])
def test_bounds_of_importance_weights_are_accepted_where_rollouts_are_off_policy(bound, value):
    values = {"model": {"path": "m"}, "algorithm": {"correction": {bound: value}}}
    with pytest.raises(ValidationError, match=f"{bound}={value:g} has no effect with experience.replay.num_groups=0"):
        RunConfig.model_validate(values)
    off_policy = {"engine": {"weight_format": "fp8"}}, {"experience": {"replay": {"num_groups": 2}}}
    for changes in (*off_policy, {"serve": {"mode": "online"}}):
        assert getattr(RunConfig.model_validate(values | changes).algorithm.correction, bound) == value


def test_sections_are_frozen():
    with pytest.raises(ValidationError):
        AlgorithmSection().batch_size = 3


def test_defaults_are_valid():
    for section in iter_sections():
        required = [name for name, field in section.model_fields.items() if field.is_required()]
        if not required and section is not ToolSection:  # which needs one of two knobs
            assert section.model_validate(section().model_dump()) == section()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.learning_rate=.inf", "trainer.learning_rate must be less than or equal to 1"),
        ("trainer.learning_rate=1e30", "trainer.learning_rate must be less than or equal to 1, got 1e.30"),
        ("algorithm.critic.learning_rate=1e30", "learning_rate must be less than or equal to 1"),
        ("model.temperature=1e-39", "model.temperature: a temperature must be 0 .greedy. or at least 1e-05"),
        ("model.temperature=.inf", "model.temperature must be a finite number"),
        ("evaluation.temperature=1e-39", "evaluation.temperature: a temperature must be 0"),
        ("num_cpu_threads=10000", "num_cpu_threads must be less than or equal to 1024"),
        ('name="two\\nlines"', r"name='two.nlines' names a folder: it must be one line"),
        ('project="bell\\a"', r"project='bell.x07' names a folder: it must be one line"),
    ],
)
def test_values_that_would_fail_later_are_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        load_section(RunConfig, None, [override], values={"model": {"path": "m"}})


def test_zero_and_low_temperatures_are_allowed():
    for temperature in (0, 1e-5, 0.01):
        assert load_section(RunConfig, None, values={"model": {"path": "m", "temperature": temperature}})


@pytest.mark.parametrize(
    "override",
    [
        "model.top_k=1000000000000000000000",
        "model.top_k=2147483648",
        "model.lora.seed=1000000000000000000000",
        "model.lora.r=1000000",
        "model.lora.alpha=.inf",
        "trainer.betas=[.nan,0.9]",
        "trainer.betas=[0.9,1.0]",
        "trainer.weight_decay=.inf",
        "algorithm.kl_coef=.inf",
        "algorithm.correction.cap=.inf",
        "experience.refill_budget=.inf",
        "rollout.max_body_mib=.inf",
        "engine.max_num_seqs=1000000000",
        "cluster.timeout_s=.inf",
        "early_stopping={metric: rollout/reward_mean, target: .nan}",
        "auxiliary_models.a={path: m, base_url: localhost}",
    ],
)
def test_a_number_or_address_that_no_run_survives_is_refused_by_the_name_of_its_knob(override):
    key = override.partition("=")[0]
    with pytest.raises(ConfigError) as caught:
        load_section(RunConfig, None, ["model.path=m", override])
    assert str(caught.value).startswith(key)
    assert "\n" not in str(caught.value)
