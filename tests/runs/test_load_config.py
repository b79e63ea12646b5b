from __future__ import annotations

from pathlib import Path

import pytest

from tunesmith.commands.settings import find_config_class
from tunesmith.commands.table import list_config_classes
from tunesmith.config import LoraSection, RunConfig
from tunesmith.errors import ConfigError, DataError, errors_of
from tunesmith.runs.load_config import (
    build_section,
    change_section,
    describe_options,
    dump_config,
    load_section,
    load_values,
)


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def fault_of(values: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        build_section(RunConfig, {"model": {"path": "m"}} | values)
    return str(caught.value)


def test_keys_missing_from_a_file_keep_their_defaults(tmp_path):
    config = load_section(
        RunConfig, write(tmp_path, "model: {path: some/model}\ntrainer: {learning_rate: 1e-6}\nname: first\n")
    )
    assert config.model.path == "some/model"
    assert config.trainer.learning_rate == 1e-6
    assert config.algorithm == RunConfig.model_fields["algorithm"].default


def test_the_default_learning_rate_depends_on_what_is_trained(tmp_path):
    whole = load_section(RunConfig, write(tmp_path, "model: {path: m}\ntrainer: {learning_rate: null}\n"))
    adapter = change_section(whole, ["model.lora={}"])
    assert (whole.learning_rate, adapter.learning_rate) == (1e-6, 2e-5)
    assert "learning_rate: 2.0e-05" in dump_config(adapter)
    assert change_section(adapter, ["model.lora=null", "trainer.warmup_steps=3"]).learning_rate == 1e-6
    assert change_section(adapter, ["trainer.learning_rate=1e-6"]).learning_rate == 1e-6
    assert change_section(adapter, ["trainer.learning_rate=null"]).learning_rate == 2e-5


def test_overrides_win_over_the_file_and_need_no_file(tmp_path):
    path = write(tmp_path, "model: {path: a}\nalgorithm: {group_size: 4}\n")
    config = load_section(
        RunConfig, path, ["algorithm.group_size=16", "name=null", "trainer.betas=[0.8, 0.9]", "project='1e3'"]
    )
    assert (config.algorithm.group_size, config.name, config.trainer.betas) == (16, None, (0.8, 0.9))
    assert config.project == "1e3"
    assert (
        load_section(RunConfig, None, ["model.path=b", "eval_datasets.test.path=d"]).eval_datasets["test"].path == "d"
    )


def test_an_empty_mapping_replaces_the_mapping_of_the_file(tmp_path):
    path = write(tmp_path, "model: {path: a, lora: {r: 4}}\neval_datasets: {a: {path: d}}\n")
    config = load_section(RunConfig, path, ["eval_datasets={}", "model.lora={}"])
    assert config.eval_datasets == {}
    assert config.model.lora == LoraSection()
    again = load_section(RunConfig, path, ["eval_datasets={}", "eval_datasets.b.path=e"])
    assert list(again.eval_datasets) == ["b"]
    merged = load_section(RunConfig, path, ["eval_datasets={b: {path: e}}"])
    assert list(merged.eval_datasets) == ["a", "b"]


def test_environment_variables_and_other_keys_are_interpolated(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNESMITH_TEST_MODEL", "from/env")
    model, project = "'${oc.env:TUNESMITH_TEST_MODEL,x}'", "'${oc.env:TUNESMITH_TEST_NONE,y}'"
    config = load_section(
        RunConfig, write(tmp_path, f"model: {{path: {model}}}\nproject: {project}\nname: ${{project}}\n")
    )
    assert (config.model.path, config.project, config.name) == ("from/env", "y", "y")


def test_an_override_is_interpolated_with_the_file(tmp_path):
    path = write(tmp_path, "model: {path: m}\nproject: y\n")
    assert load_section(RunConfig, path, ["name=${project}-2", "model.path=${name}/m"]).model.path == "y-2/m"
    with pytest.raises(ConfigError, match=r"^name: Interpolation key 'none' not found$"):
        load_section(RunConfig, path, ["name=${none}"])


def test_an_unset_variable_is_named(tmp_path):
    path = write(tmp_path, "model: {path: '${oc.env:TUNESMITH_TEST_NONE}'}\n")
    with pytest.raises(ConfigError, match=r"^model\.path: Environment variable 'TUNESMITH_TEST_NONE' not found$"):
        load_section(RunConfig, path)


def test_an_override_of_a_variable_that_nothing_reads_is_an_error(tmp_path):
    path = write(
        tmp_path,
        "variables: {seed: 0, rates: {sft: 1, rl: 2}, engine: {size: 1}, rft: &rft {steps: 1}}\n"
        "stages: {rft: *rft, seed: '${variables.seed}', rl: '${variables.rates.rl}', engine: '${variables.engine}'}\n",
    )
    for key, value in {"seed": 3, "rates": "{rl: 4}", "rates.rl": 4, "engine.size": 2, "engine.other": 2}.items():
        assert load_values(path, [f"variables.{key}={value}"]) != load_values(path)
    assert load_values(path, ["variables.seed=0"]) == load_values(path)
    for key in ("rft.steps", "rates.sft", "new"):
        with pytest.raises(ConfigError, match=rf"variables\.{key} has no effect: no key of the file has"):
            load_values(path, [f"variables.{key}=5"])


def test_the_error_of_an_unknown_key_suggests_the_nearest_key():
    assert fault_of({"algorithm": {"grop_size": 8}}) == (
        "algorithm.grop_size is not a known key: did you mean 'group_size'?"
    )
    assert fault_of({"algoritm": {}}) == "algoritm is not a known key: did you mean 'algorithm'?"
    assert "known: path, name" in fault_of({"train_dataset": {"path": "d", "zzz": 1}})
    assert fault_of({"auxiliary_models": {"judge": {"path": "m", "base_ulr": "u"}}}) == (
        "auxiliary_models.judge.base_ulr is not a known key: did you mean 'base_url'?"
    )


def test_the_error_of_a_value_names_key_value_and_allowed_range():
    assert fault_of({"algorithm": {"group_size": 0}}) == (
        "algorithm.group_size must be greater than or equal to 1, got 0"
    )
    assert fault_of({"trainer": {"schedule": "linear"}}) == (
        "trainer.schedule must be 'constant' or 'cosine', got 'linear'"
    )
    assert "total_steps must be a valid integer" in fault_of({"total_steps": "many"})
    assert fault_of({"engine": "fast"}) == "engine must be a mapping of keys to values, got 'fast'"


def test_a_missing_key_is_named():
    with pytest.raises(ConfigError, match=r"^model is required$"):
        build_section(RunConfig, {})
    assert fault_of({"train_dataset": {"split": "test"}}) == "train_dataset.path is required"


def test_all_errors_are_reported_at_once():
    assert fault_of({"seed": -1, "engine": {"page_size": 0}}).count("must be") == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "must hold a mapping"),
        ("a: [1\n", "is not YAML"),
        ("project: ${b\n", "project: "),
        ("a: " + "[" * 5000 + "]" * 5000, "is nested too deeply"),
        ("\n".join(" " * i + "a:" for i in range(5000)), "is nested too deeply"),
    ],
)
def test_a_file_that_is_not_a_run_file_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load_section(RunConfig, write(tmp_path, text))


def test_a_missing_file_or_a_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config file .*none\.yaml does not exist"):
        load_section(RunConfig, tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot read the config file"):
        load_section(RunConfig, tmp_path)


@pytest.mark.parametrize("override", ["seed", "=3", "model=[1", "model.path.deep=1"])
def test_an_invalid_override_is_refused(tmp_path, override):
    with pytest.raises(ConfigError):
        load_section(RunConfig, write(tmp_path, "model: {path: m}\n"), [override])


def test_a_dumped_config_reads_back_equal(tmp_path):
    config = build_section(
        RunConfig,
        {
            "model": {"path": "a ${b} \\${c} \\\\${d} \\e $f"},
            "name": "1e5",
            "trainer": {"learning_rate": 3e-7, "betas": [0.9, 0.95]},
            "train_dataset": {"path": "d: #x", "required_fields": ["question", "answer"]},
            "algorithm": {"loss_args": {"clip_high": 0.28, "note": "über"}},
            "auxiliary_models": {"judge": {"path": "j", "base_url": "http://x/v1"}},
        },
    )
    assert load_section(RunConfig, write(tmp_path, dump_config(config))) == config


def test_every_knob_is_listed_once_with_a_description():
    options = {option.key: option for option in describe_options(RunConfig)}
    assert len(options) == len(list(describe_options(RunConfig)))
    assert options["algorithm.group_size"].type == "int"
    assert options["algorithm.group_size"].default == "8"
    assert options["model.path"].default == "required"
    assert options["model.dtype"].type == "auto|float32|bfloat16"
    assert options["train_dataset.split"].type == "str|null"
    assert options["auxiliary_models.<name>.base_url"].default == "null"
    assert options["trainer.betas"].default == "[0.9, 0.999]"
    assert options["monitor.trackers"].type == "list of tensorboard|wandb|mlflow|swanlab"
    assert [key for key, option in options.items() if not option.description] == []


def test_the_schema_describes_every_section():
    schema = RunConfig.model_json_schema()
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(RunConfig.model_fields)
    assert all("description" in section for section in schema["$defs"].values())


@pytest.mark.parametrize("stage", list_config_classes())
def test_the_file_of_every_stage_has_options_and_a_schema(stage):
    kind = find_config_class(stage)
    assert kind.model_json_schema()["title"] == kind.__name__
    assert all(option.description for option in describe_options(kind))


def test_the_error_of_an_unknown_stage_lists_the_known_ones():
    with pytest.raises(ConfigError, match="stage 'train': allowed are tune, sft, prefer, prepare"):
        find_config_class("train")


def test_an_override_that_is_nested_too_deeply_is_named_by_its_key():
    with pytest.raises(ConfigError) as refused:
        load_section(RunConfig, None, ["algorithm.loss_args=" + "[" * 5000 + "]" * 5000])
    assert str(refused.value) == "the value of the override of algorithm.loss_args is nested too deeply to be read"


def test_the_error_of_a_key_with_several_types_has_the_key_alone():
    with pytest.raises(ConfigError, match=r"^model\.lora\.target_modules must be 'attention' or 'all-linear', got 'q'"):
        load_section(RunConfig, None, ["model.path=m", "model.lora.target_modules=q"])


def test_an_error_that_speaks_of_a_data_set_is_still_prefixed_with_the_key_data():
    with pytest.raises(DataError, match=r"^data: the data set 'a' has no rows$"), errors_of("data"):
        raise DataError("the data set 'a' has no rows")
    with pytest.raises(DataError, match=r"^data\.path='a' is empty$"), errors_of("data"):
        raise DataError("data.path='a' is empty")
