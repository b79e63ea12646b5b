"""The memory in a run's first lines."""

from __future__ import annotations

import dataclasses

import pytest

from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.config import PreferenceConfig, RunConfig
from tunesmith.model.checkpoint import save_model_files
from tunesmith.model.memory import find_ends
from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer
from tunesmith.runs.memory import collect_run_settings, describe_memory, fit_offline, fit_run


@pytest.fixture(scope="module")
def model():
    return build_pocket_model(build_pocket_tokenizer(), seed=0)


def test_the_first_lines_name_the_sum_and_its_parts_in_80_columns(model):
    config = RunConfig(model={"path": "pocket"}, algorithm={"batch_size": 2, "group_size": 3, "kl_coef": 0.1})
    algorithm = resolve_algorithm(config.algorithm)
    settings = collect_run_settings(config, algorithm, model)
    assert settings.num_tokens == 2 * 3 * 4096
    assert settings.extra_bytes == {"reference": 4 * model.num_parameters()}
    lines = describe_memory(model, settings)
    assert lines[0].startswith("memory  at most ") and "GiB:" in lines[0]
    assert "activations of 16,384 tokens" in " ".join(lines)
    assert max(map(len, lines)) <= 80
    large = dataclasses.replace(settings, extra_bytes={"critic": 2**60})
    said = " ".join(" ".join(describe_memory(model, large)).split())
    assert said.endswith(
        "this may not fit: lower trainer.max_tokens_per_row, or set trainer.has_gradient_checkpointing"
    )
    assert fit_run(config, algorithm, model)[0].trainer == config.trainer  # rows on a CPU stay as they are


def test_the_reference_of_a_preference_loss_is_counted(model):
    values = {"model": {"path": "pocket", "max_model_len": 64}, "train_dataset": {"path": "d"}, "algorithm_type": "dpo"}
    for changes, expected in (({}, {"reference": 4 * model.num_parameters()}), ({"lora": {"r": 2}}, {})):
        config = PreferenceConfig.model_validate(values | {"model": values["model"] | changes})
        assert fit_offline(config, model, has_reference=True).extra_bytes == expected


def test_ranks_share_the_layers_of_the_reference(model):
    config = RunConfig(
        model={"path": "pocket"},
        algorithm={"kl_coef": 0.1},
        cluster={"num_workers": 2, "has_sharded_weights": True},
        engine={"kind": "vllm"},
    )
    settings = collect_run_settings(config, resolve_algorithm(config.algorithm), model)
    ends = sum(each.nbytes for each in find_ends(model))
    assert settings.extra_bytes == {"reference": ends + (4 * model.num_parameters() - ends) // 2}


def test_local_auxiliary_models_are_counted(model, tmp_path):
    save_model_files(tmp_path, model, build_pocket_tokenizer())
    auxiliary = {"judge": {"path": str(tmp_path)}, "far": {"path": "large", "base_url": "http://host/v1"}}
    config = RunConfig(model={"path": "pocket"}, auxiliary_models=auxiliary)
    settings = collect_run_settings(config, resolve_algorithm(config.algorithm), model)
    assert settings.extra_bytes == {"auxiliary judge": 4 * model.num_parameters()}
