"""`tune(config=...)`: one typed object, or a file, in place of AgentScope's arguments; and what the result shows."""

from __future__ import annotations

import asyncio
import re

import pytest
import yaml
from peft import PeftModel
from transformers import PreTrainedModel
from user_functions import ask, judge

from tunesmith import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune
from tunesmith.config import LoraSection
from tunesmith.errors import ConfigError


def test_a_run_config_trains_and_the_result_is_small(config):
    result = tune(config, workflow_func=ask, judge_func=judge)
    assert result.model_path == str(result.folder / "global_step_2")
    table = result.history
    assert table.steps == (1, 2)
    assert table["rollout/reward_mean"][-1] == result.metrics["rollout/reward_mean"]
    assert table.rows[2]["eval/test/reward"] == result.evaluations["test"].mean
    assert len(repr(result)) < 1000
    assert "Tom has" not in repr(result) + result._repr_html_()
    first, last = table["rollout/reward_mean"]
    assert f"{first:.4g} in the first step, {last:.4g} in the last step" in repr(result)
    assert "<svg" in result._repr_html_()


def test_a_result_loads_its_model_for_transformers(config):
    result = tune(config=config, workflow_func=ask, judge_func=judge)
    model, tokenizer = result.model()
    assert isinstance(model, PreTrainedModel)
    ids = tokenizer("Tom", return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=2, do_sample=False).shape[1] == ids["input_ids"].shape[1] + 2


def test_the_model_of_an_adapter_run_is_a_peft_model(config):
    lora = config.model_copy(update={"model": config.model.model_copy(update={"lora": LoraSection(r=4)})})
    model, _ = tune(lora, workflow_func=ask, judge_func=judge, overrides=["trainer.learning_rate=1e-2"]).model()
    assert isinstance(model, PeftModel)
    factors = [tensor for name, tensor in model.named_parameters() if "lora_B" in name]
    assert factors and any(tensor.abs().max() > 0 for tensor in factors)


def test_overrides_change_single_keys_of_a_config(config):
    result = tune(config, workflow_func=ask, judge_func=judge, overrides=["total_steps=1", "name=y"])
    assert (result.folder.name, result.num_steps) == ("y", 1)
    with pytest.raises(ConfigError, match="did you mean 'total_steps'"):
        tune(config, workflow_func=ask, overrides=["total_step=1"])


def test_a_name_in_place_of_a_function_is_refused_with_the_keys_that_take_it(config):
    with pytest.raises(ValueError, match=r"^'agent.py:ask' is no function; its name belongs into .*The workflow "):
        tune(config, workflow_func="agent.py:ask", judge_func=judge)
    with pytest.raises(ValueError, match=r"^'judge' is no function; its name belongs into .*The judge "):
        tune(config, workflow_func=ask, judge_func="judge")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"model": TunerModelConfig(model_path="m", max_model_len=9)}, "model"),
        ({"algorithm": AlgorithmConfig(), "train_dataset": DatasetConfig(path="d")}, "train_dataset, algorithm"),
        ({"experiment_name": "n"}, "experiment_name"),
        ({"config_path": "run.yaml"}, "config_path"),
    ],
)
def test_config_and_arguments_of_agentscope_exclude_each_other(config, arguments, named):
    with pytest.raises(ConfigError, match=re.escape(f"tune() got config and {named}:")):
        tune(config, workflow_func=ask, **arguments)


def test_functions_may_be_named_in_the_config_or_replaced(config, functions):
    named = config.model_copy(update={"workflow": f"{functions}:ask", "judge": f"{functions}:judge"})
    assert tune(named, overrides=["name=a"]).metrics["rollout/from_file/mean"] == 1.0
    assert "rollout/from_file/mean" in tune(named, workflow_func=ask, overrides=["name=b"]).metrics
    assert "rollout/from_file/mean" not in tune(named, judge_func=judge, overrides=["name=c"]).metrics


def test_a_missing_workflow_is_named(config):
    with pytest.raises(ConfigError, match="workflow is missing.*pass workflow_func"):
        tune(config)
    with pytest.raises(ConfigError, match="model is missing: give tune\\(\\) a config"):
        tune(workflow_func=ask)
    with pytest.raises(ConfigError, match="config must be of type RunConfig or the path of a YAML file, got dict"):
        tune({"model": {"path": "m"}}, workflow_func=ask)


def test_a_file_gives_the_same_run_as_its_config(config, tmp_path):
    whole = tune(config, workflow_func=ask, judge_func=judge)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    from_file = tune(path, workflow_func=ask, judge_func=judge, overrides=["name=file"])
    assert drop_times(from_file.metrics) == drop_times(whole.metrics)


def drop_times(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def test_continuing_a_config_resumes_its_run(config):
    tune(config, workflow_func=ask, judge_func=judge)
    longer = config.model_copy(update={"total_steps": 3})
    result = tune(longer, workflow_func=ask, judge_func=judge, continue_from_checkpoint=True)
    assert result.num_steps == 3
    assert result.history.steps == (1, 2, 3)


def test_a_config_trains_while_an_event_loop_runs(config):
    async def main():
        return tune(config, workflow_func=ask, judge_func=judge)

    assert asyncio.run(main()).num_steps == 2


@pytest.mark.parametrize("overrides", ["seed=1", [1], 5, {"seed": 1}, [None]])
def test_overrides_of_another_type_are_named(config, overrides):
    with pytest.raises(ConfigError, match="overrides must be a list of 'key=value' texts"):
        tune(config, workflow_func=ask, judge_func=judge, overrides=overrides)


@pytest.mark.parametrize("operators", [5, "outcome_gate", ["outcome_gate"], [1]])
def test_operators_of_another_type_are_named(config, operators):
    with pytest.raises(ConfigError, match="operators must be a list of functions"):
        tune(config, workflow_func=ask, judge_func=judge, operators=operators)
