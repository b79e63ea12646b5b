"""Settings that nothing would read are refused before a model loads."""

from __future__ import annotations

import asyncio
import json

import pytest

from tunesmith import DatasetConfig, JudgeOutput, TaskSelectorConfig, TunerModelConfig, WorkflowOutput, select_model
from tunesmith.commands.pass_rate import measure_pass_rates
from tunesmith.commands.sft.plan import load_conversation_rows
from tunesmith.config import ConversationDataSection, RunConfig
from tunesmith.errors import ConfigError, DataError
from tunesmith.runs.load_config import load_section
from tunesmith.runs.load_function import load_functions


async def ask(task, model):
    return WorkflowOutput(response="4")


async def ask_tools(task, model, environment):
    return WorkflowOutput(response="4")


async def judge(task, response):
    return JudgeOutput(reward=1.0)


async def ask_judge(task, response, auxiliary_models):
    return JudgeOutput(reward=1.0)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"question": str(n)}) + "\n" for n in range(3)))
    return str(path)


def build_config(**values):
    return RunConfig.model_validate({"model": {"path": "no-model"}} | values)


def test_an_environment_that_the_workflow_does_not_take_is_refused():
    config = build_config(environment={"max_calls": 3})
    with pytest.raises(ConfigError, match="environment.max_calls has no effect: the workflow .*ask has no parameter"):
        load_functions(config, ask, judge)
    load_functions(config, ask_tools, judge)
    load_functions(build_config(), ask, judge)


def test_auxiliary_models_that_no_function_takes_are_refused():
    config = build_config(auxiliary_models={"grader": {"path": "m"}})
    with pytest.raises(ConfigError, match="auxiliary_models.grader has no effect: neither the workflow nor the judge"):
        load_functions(config, ask, judge)
    load_functions(config, ask, ask_judge)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"evaluation": {"num_samples": 4}}, "evaluation.num_samples=4 has no effect without eval_datasets"),
        ({"evaluation": {"max_tasks": 2}}, "evaluation.max_tasks=2 has no effect without eval_datasets"),
        ({"callbacks": {"on_evaluation": "a:b"}}, "callbacks.on_evaluation=a:b has no effect without eval_datasets"),
    ],
)
def test_knobs_of_evaluations_without_held_out_tasks_are_refused(data, values, message):
    with pytest.raises(ConfigError, match=message):
        load_section(RunConfig, None, values={"model": {"path": "m"}, "train_dataset": {"path": data}, **values})


def test_when_to_evaluate_may_be_given_without_held_out_tasks():
    assert build_config(evaluation={"at_start": True, "interval_steps": 5}).evaluation.at_start


@pytest.mark.parametrize(
    ("dataset", "arguments", "message"),
    [
        ({"weight": 2.0}, {}, "train_dataset.weight has no effect"),
        ({"total_epochs": 2}, {}, "train_dataset.total_epochs has no effect"),
        ({"task_selector": TaskSelectorConfig()}, {}, "train_dataset.task_selector has no effect"),
        ({}, {"timeout_s": float("nan")}, "timeout_s must be greater than 0, got nan"),
        ({}, {"max_failure_rate": 7}, "max_failure_rate must be less than 1, got 7"),
        ({}, {"seed": -1}, "seed must be greater than or equal to 0, got -1"),
        ({}, {"max_threads": 1.5}, "max_threads must be a valid integer, .*got 1.5"),
        ({}, {"chat_model": "other"}, "chat_model='other' must be one of auto, agentscope, openai"),
    ],
)
def test_select_model_refuses_arguments_without_effect_or_out_of_range(
    data, pocket_folder, dataset, arguments, message
):
    models = [TunerModelConfig(model_path=pocket_folder, max_model_len=128)] * 2
    selection = select_model(
        workflow_func=ask,
        judge_func=judge,
        train_dataset=DatasetConfig(path=data, **dataset),
        candidate_models=models,
        **arguments,
    )
    with pytest.raises(ConfigError, match=message):
        asyncio.run(selection)


@pytest.mark.parametrize(("given", "message"), [({"num_runs": 0}, "num_runs=0"), ({"field": ""}, "field is empty")])
def test_a_measurement_of_nothing_is_refused(data, tmp_path, given, message):
    with pytest.raises(ConfigError, match=message):
        measure_pass_rates(
            build_config(train_dataset={"path": data}),
            workflow=ask,
            judge=judge,
            build_model=lambda endpoint, options: None,
            out=tmp_path / "out.jsonl",
            **({"field": "rate", "num_runs": 2} | given),
        )


@pytest.mark.parametrize("given", [{"name": "other"}, {"split": "test"}])
def test_a_part_of_a_file_that_has_none_is_refused(data, given):
    with pytest.raises(DataError, match=next(iter(given))):
        load_conversation_rows(ConversationDataSection(path=data, **given))
    assert len(load_conversation_rows(ConversationDataSection(path=data, split="tasks"))) == 3
