"""AgentScope's configuration classes have its fields and defaults; every field is translated or refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tunesmith import tune
from tunesmith.cluster.rank_info import RankInfo
from tunesmith.commands.settings import load_settings
from tunesmith.commands.table import find_command
from tunesmith.compat.agentscope_config import (
    AlgorithmConfig,
    DatasetConfig,
    TinkerConfig,
    TunerModelConfig,
    translate_tune_arguments,
)
from tunesmith.compat.trinity_algorithms import ADVANTAGES
from tunesmith.config import (
    AlgorithmSection,
    DatasetSection,
    EvaluationSection,
    ModelSection,
    RunConfig,
    SelectorSection,
    TrainerSection,
)
from tunesmith.errors import ConfigError
from tunesmith.runs.load_config import load_section
from tunesmith.runs.placement import place_config

NOTHING = dict.fromkeys(
    (
        "train_dataset", "eval_dataset", "model", "auxiliary_models", "algorithm",
        "project_name", "experiment_name", "monitor_type",
    )
)  # fmt: skip


def translate(**given):
    return translate_tune_arguments(**(NOTHING | given))


def test_defaults_are_those_of_agentscope_and_of_our_sections():
    model, algorithm = TunerModelConfig(model_path="m", max_model_len=64), AlgorithmConfig()
    ours = ModelSection(path="m", max_model_len=64)
    assert (model.temperature, model.top_p, model.max_tokens) == (1.0, 1.0, 8192)
    assert (ours.temperature, ours.top_p, ours.max_tokens) == (1.0, 1.0, 8192)
    assert (model.tool_call_parser, model.reasoning_parser) == ("hermes", "deepseek_r1")
    assert (ours.tool_call_parser, ours.reasoning_parser) == (
        "auto",
        "auto",
    )  # set only if the caller sets AgentScope's
    section = AlgorithmSection()
    assert (section.algorithm_type, section.group_size, section.batch_size) == ("multi_step_grpo", 8, 32)
    assert TrainerSection().peak_learning_rate == algorithm.learning_rate == 1e-6
    assert EvaluationSection().interval_steps == algorithm.eval_interval_steps == 100
    assert DatasetSection(path="d").split == DatasetConfig(path="d").split == "train"
    assert RunConfig(model={"path": "m"}).save_interval_steps == algorithm.save_interval_steps


def test_every_given_field_reaches_the_run_config():
    given = translate(
        train_dataset=DatasetConfig(path="d", name="n", split="s", total_epochs=3, total_steps=7),
        eval_dataset=DatasetConfig(path="e", split="test"),
        model=TunerModelConfig(
            model_path="m", max_model_len=99, temperature=0.5, top_p=0.9, max_tokens=11, enable_thinking=False,
            reasoning_parser=None, tool_call_parser="none",
        ),
        auxiliary_models={"grader": TunerModelConfig(model_path="h", max_model_len=50, temperature=0.1)},
        algorithm=AlgorithmConfig(
            algorithm_type="grpo", learning_rate=1e-3, group_size=2, batch_size=4,
            save_interval_steps=5, eval_interval_steps=6,
        ),
        project_name="p", experiment_name="x", monitor_type="tensorboard",
    )  # fmt: skip
    config = RunConfig(**given)
    assert (config.train_dataset.path, config.train_dataset.name, config.train_dataset.split) == ("d", "n", "s")
    assert (config.total_epochs, config.total_steps, config.save_interval_steps) == (3, 7, 5)
    assert config.eval_datasets["eval_taskset"].split == "test"
    assert (config.model.path, config.model.max_model_len, config.model.temperature) == ("m", 99, 0.5)
    assert (config.model.top_p, config.model.max_tokens, config.model.enable_thinking) == (0.9, 11, False)
    assert (config.model.reasoning_parser, config.model.tool_call_parser) == ("none", "none")
    assert config.auxiliary_models["grader"].temperature == 0.1
    assert (config.algorithm.algorithm_type, config.algorithm.group_size) == ("grpo", 2)
    assert (config.trainer.learning_rate, config.evaluation.interval_steps) == (1e-3, 6)
    assert (config.project, config.name, config.monitor.trackers) == ("p", "x", ("tensorboard",))


def test_unset_fields_override_nothing():
    given = translate(
        train_dataset=DatasetConfig(path="d"),
        model=TunerModelConfig(model_path="m", max_model_len=9),
        algorithm=AlgorithmConfig(group_size=2),
    )
    assert given == {
        "train_dataset": {"path": "d"},
        "train_datasets": {},
        "model": {"path": "m", "max_model_len": 9},
        "algorithm": {"group_size": 2},
    }


def test_training_sets_replace_those_of_the_file():
    file = {
        "model": {"path": "m"},
        "total_steps": 9,
        "train_datasets": {"a": {"path": "1", "required_fields": ["q"]}, "b": {"path": "2"}},
    }
    one = load_section(RunConfig, None, base=file, values=translate(train_dataset=DatasetConfig(path="3")))
    assert one.training_sets == {"train": DatasetSection(path="3")} and one.total_steps == 9
    sets = {"a": DatasetConfig(path="3", total_epochs=2), "c": DatasetConfig(path="4")}
    several = load_section(RunConfig, None, base=file, values=translate(train_dataset=sets))
    assert several.training_sets == {
        "a": DatasetSection(path="3", required_fields=("q",)),
        "c": DatasetSection(path="4"),
    }
    assert (several.total_epochs, several.total_steps) == (2, None)
    assert list(load_section(RunConfig, None, base=file).training_sets) == ["a", "b"]


def test_another_selector_takes_no_arguments_from_the_file():
    bots = {"selector_type": "difficulty_based", "feature_keys": ["a"], "args": {"m": 4.0, "tau": 0.0}}
    file = {"model": {"path": "m"}, "train_dataset": {"path": "1", "task_selector": bots}}

    def select(selector):
        values = translate(train_dataset=DatasetConfig(path="1", task_selector=selector))
        return load_section(RunConfig, None, base=file, values=values).train_dataset.task_selector

    assert select("random") == SelectorSection(selector_type="random")
    same = select({"selector_type": "difficulty_based", "kwargs": {"tau": 1.0}})
    assert same == SelectorSection(**bots | {"args": {"m": 4.0, "tau": 1.0}})
    assert select(None) == SelectorSection(**bots)


@pytest.mark.parametrize("key", ["train_dataset", "eval_dataset"])
@pytest.mark.parametrize("given", ["path", [DatasetConfig(path="d")], {"a": "path"}])
def test_a_data_set_of_another_type_is_refused(key, given):
    with pytest.raises(ConfigError, match=f"{key} must be of type DatasetConfig, or a mapping of names"):
        translate(**{key: given})
    with pytest.raises(ConfigError, match=f"{key} must be of type DatasetConfig"):
        tune(model=TunerModelConfig(model_path="m", max_model_len=8), **{key: given})


@pytest.mark.parametrize(
    ("key", "given", "form"),
    [
        ("model", "path", "of type TunerModelConfig"),
        ("model", {"model_path": "m"}, "of type TunerModelConfig"),
        ("algorithm", {"group_size": 2}, "of type AlgorithmConfig"),
        ("auxiliary_models", {"judge": "path"}, "a mapping of names to TunerModelConfigs"),
        ("auxiliary_models", [], "a mapping of names to TunerModelConfigs"),
    ],
)
def test_an_argument_of_another_type_is_refused_by_its_name(key, given, form):
    with pytest.raises(ConfigError, match=f"^{key} must be {form}, got "):
        translate(**{key: given})


def test_a_held_out_set_must_not_set_the_length_of_the_run():
    with pytest.raises(ConfigError, match="total_steps of the held-out set 'eval_taskset' has no effect"):
        translate(eval_dataset=DatasetConfig(path="d", total_steps=3))


@pytest.mark.parametrize(
    ("field", "value"),
    [("tensor_parallel_size", 0), ("inference_engine_num", 0), ("tinker_config", 1), ("temprature", 1)],
)
def test_an_unsupported_field_is_an_error(field, value):
    with pytest.raises(ValidationError, match=field):
        TunerModelConfig(model_path="m", max_model_len=9, **{field: value})


def test_preview_prints_and_returns_the_first_rows(tmp_path, capsys):
    (tmp_path / "train.jsonl").write_text('{"question": "2 + 2", "answer": "4"}\n{"question": "3", "answer": "3"}\n')
    assert DatasetConfig(path=str(tmp_path)).preview(n=1) == [{"question": "2 + 2", "answer": "4"}]
    assert '"question": "2 + 2"' in capsys.readouterr().out


def test_preview_raises_the_same_errors_as_agentscope(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "2 + 2", "answer": "4"}\n')
    with pytest.raises(OSError, match="no_such_folder"):
        DatasetConfig(path=str(tmp_path / "no_such_folder")).preview()
    with pytest.raises(ValueError, match="no_such_split"):
        DatasetConfig(path=str(tmp_path), split="no_such_split").preview()


def test_several_engines_are_ranks():
    trained = translate(model=TunerModelConfig(model_path="m", max_model_len=9, inference_engine_num=4))
    assert trained["model"] == {"path": "m", "max_model_len": 9}
    assert trained["cluster"] == {"num_workers": 4}
    assert "cluster" not in translate(model=TunerModelConfig(model_path="m", max_model_len=9))


def test_a_model_split_over_gpus_is_sampled_by_one_vllm(caplog):
    whole = {"model_path": "m", "max_model_len": 9, "tensor_parallel_size": 2}
    given = translate(model=TunerModelConfig(**whole))
    assert given["engine"] == {"kind": "vllm", "tensor_parallel_size": 2}
    assert given["cluster"] == {"num_workers": 2, "has_sharded_weights": True}
    adapted = translate(model=TunerModelConfig(**whole, tinker_config=TinkerConfig(rank=8)))
    assert (adapted["engine"], "cluster" in adapted) == (given["engine"], False)
    assert translate(model=TunerModelConfig(**whole, inference_engine_num=2)) == given
    assert "inference_engine_num=2 has no effect: one vLLM over 2 GPUs samples" in caplog.text


def test_engines_of_an_auxiliary_model_are_a_note(caplog):
    auxiliary = TunerModelConfig(model_path="h", max_model_len=9, inference_engine_num=8, tensor_parallel_size=2)
    assert translate(auxiliary_models={"judge": auxiliary}) == {
        "auxiliary_models": {"judge": {"path": "h", "max_model_len": 9}}
    }
    assert "auxiliary_models.judge.inference_engine_num=8 has no effect: each rank runs" in caplog.text
    assert "auxiliary_models.judge.tensor_parallel_size=2 has no effect" in caplog.text


def test_parsers_that_are_none_leave_the_text_as_it_is():
    model = TunerModelConfig(model_path="m", max_model_len=9, tool_call_parser=None, reasoning_parser=None)
    section = RunConfig(**translate(model=model)).model
    assert (section.tool_call_parser, section.reasoning_parser) == ("none", "none")


def test_a_program_in_one_process_does_the_work_of_all_ranks(caplog):
    model = TunerModelConfig(model_path="m", max_model_len=9, inference_engine_num=4)
    config = RunConfig(**translate(model=model))
    assert place_config(config, RankInfo(), num_gpus=0).cluster.num_workers is None
    assert "num_workers=4" in caplog.text and "torchrun --nproc-per-node 4" in caplog.text
    assert place_config(config, RankInfo(world_size=4, local_size=4), num_gpus=0).cluster.num_workers == 4
    with pytest.raises(ConfigError, match=r"num_workers=4, but this run has 2 ranks"):
        place_config(config, RankInfo(world_size=2, local_size=2), num_gpus=0)
    sharded = RunConfig(**translate(model=TunerModelConfig(model_path="m", max_model_len=9, tensor_parallel_size=4)))
    with pytest.raises(ConfigError, match=r"num_workers=4, but this run has one process"):
        place_config(sharded, RankInfo(), num_gpus=0)


def test_only_an_auxiliary_model_may_be_on_a_server():
    hosted = TunerModelConfig(model_path="big", max_model_len=9, base_url="http://h/v1", api_key_env="KEY")
    given = translate(auxiliary_models={"judge": hosted}, model=TunerModelConfig(model_path="m", max_model_len=9))
    section = RunConfig(**given).auxiliary_models["judge"]
    assert (section.path, section.base_url, section.api_key_env) == ("big", "http://h/v1", "KEY")
    with pytest.raises(ConfigError, match=r"model\.base_url='http://h/v1' is not supported.*auxiliary_models"):
        translate(model=hosted)


def test_an_empty_mapping_removes_the_held_out_sets_of_the_file():
    file = {"model": {"path": "m"}, "eval_datasets": {"a": {"path": "1"}}}
    assert load_section(RunConfig, None, base=file, values=translate(eval_dataset={})).eval_datasets == {}
    assert list(load_section(RunConfig, None, base=file, values=translate()).eval_datasets) == ["a"]


@pytest.mark.parametrize("is_program", [True, False])
def test_an_algorithm_of_a_program_is_read_with_the_loss_of_its_trinity_file(tmp_path, is_program):
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: {model_path: m, max_model_len: 9}\n"
        "algorithm: {algorithm_type: grpo, policy_loss_fn: rec, policy_loss_fn_args: {epsilon_low: 0.2}}\n"
        "buffer: {explorer_input: {taskset: {path: d}}}\n"
    )
    overrides = [] if is_program else ["algorithm.algorithm_type=multi_step_grpo", "algorithm.group_size=4"]
    given = AlgorithmConfig(algorithm_type="multi_step_grpo", group_size=4) if is_program else None
    settings = load_settings(find_command("tune"), file, overrides, values=translate(algorithm=given))
    assert (settings.algorithm.algorithm_type, settings.algorithm.group_size) == ("rec", 4)
    assert settings.algorithm.advantage == f"{ADVANTAGES}:compute_multi_step_grpo_advantages"
    assert settings.algorithm.loss_args == {"epsilon_low": 0.2}


def test_an_unknown_field_of_an_algorithm_is_refused():
    with pytest.raises(ValueError, match="lerning_rate"):
        AlgorithmConfig(lerning_rate=1e-6)
