"""`tool_agent` in `tune()`, `pass-rate` and run files: bound to the environment of the config, tools loaded by name."""

from __future__ import annotations

import json
from functools import partial

import pytest

from tunesmith import measure_pass_rates, tune
from tunesmith.commands.settings import check_paths
from tunesmith.config import EnvironmentSection, RunConfig, ToolSection
from tunesmith.environments import Environment, tool_agent
from tunesmith.errors import ConfigError, ToolUnavailableError
from tunesmith.experience.store import load_rollouts
from tunesmith.rollout.signature import check_workflow_function
from tunesmith.runs.load_config import build_section
from tunesmith.runs.load_function import load_environment, load_functions
from tunesmith.tools.tool import tool

TOOLS = """
from tunesmith.tools.tool import Tool

async def search(query: str) -> str:
    "Search."
    return query

def build(word):
    async def repeat(query: str) -> str:
        return word
    return Tool.from_function(repeat, description=f"Say {word}.")

number = 3
"""


@pytest.fixture
def values(tmp_path, monkeypatch, pocket_folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.py").write_text(TOOLS)
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "name": "x",
        "workflow": "tunesmith.environments:tool_agent",
        "judge": "tunesmith.judges.composite:squad_judge",
        "environment": {"tools": ["tools.py:search", "calculator"], "max_tokens": 8, "prompt": "none"},
        "model": {"path": pocket_folder, "max_model_len": 512, "max_tokens": 8, "device": "cpu"},
        "train_dataset": {"path": "train.jsonl"},
        "total_steps": 1,
        "algorithm": {"batch_size": 2, "group_size": 2},
        "engine": {"kv_cache_tokens": 4096},
        "monitor": {"has_progress": False, "trackers": []},
    }


def test_a_run_file_trains_the_agent(values):
    config = build_section(RunConfig, values)
    check_paths(config)
    result = tune(config)
    (file,) = (result.folder / "rollouts").glob("*.parquet")
    runs = [run for group in load_rollouts(file) for run in group.trajectories]
    assert [run.failure for run in runs] == [None] * 4
    assert {"search_calls", "calculator_calls", "tool_calls", "format"} <= runs[0].metrics.keys()


def test_an_environment_of_ones_own_is_passed_as_a_partial(values):
    @tool
    async def broken(query: str) -> str:
        """Never answers."""
        raise ToolUnavailableError("down")

    environment = Environment(EnvironmentSection(max_tokens=4), tools=[broken])
    config = build_section(RunConfig, values | {"workflow": None})
    result = tune(config, workflow_func=partial(tool_agent, environment=environment))
    (file,) = (result.folder / "rollouts").glob("*.parquet")
    assert "broken_calls" in load_rollouts(file)[0].trajectories[0].metrics


def test_pass_rates_of_the_agent_are_measured(values, tmp_path):
    measure_pass_rates(build_section(RunConfig, values), field="rate", out=tmp_path / "rated.jsonl", num_runs=2)
    rows = [json.loads(line) for line in (tmp_path / "rated.jsonl").read_text().splitlines()]
    assert [row["rate"] for row in rows] == [0.0] * 4


def test_a_workflow_takes_the_environment_of_its_config(values):
    async def agent(task, model, environment): ...

    async def plain(task, model): ...

    config = build_section(RunConfig, values)
    workflow, _ = load_functions(config, agent)
    assert list(workflow.keywords["environment"].tools) == ["search", "calculator"]
    check_workflow_function(agent)
    check_workflow_function(workflow)
    with pytest.raises(ConfigError, match="environment.tools has no effect: the workflow .*plain has no parameter"):
        load_functions(config, plain)


def build(*tools):
    return load_environment(EnvironmentSection(tools=tuple(ToolSection.model_validate(each) for each in tools)))


def test_a_section_renames_and_limits_a_tool(values):
    found = build(
        {"tool": "tools.py:search", "name": "find", "max_calls": 2, "timeout_s": 3, "max_result_chars": 300},
        {"tool": "tools.py:build", "settings": {"word": "hello"}},
        {"tool": "python", "settings": {"wall_s": 5}, "max_calls": 1},
    ).tools
    assert list(found) == ["find", "repeat", "python"]
    assert (found["find"].max_calls, found["find"].timeout_s, found["find"].max_result_chars) == (2, 3, 300)
    assert found["repeat"].description == "Say hello."
    assert "at most 5 s" in found["python"].description and found["python"].timeout_s is None
    assert build({"tool": "python", "is_session": True}).tools["python"].is_stateful


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("section", "length"),
    [
        ({"max_result_chars": 8000}, 6000),
        ({"max_result_chars": 300}, 300),
        ({"max_result_chars": 8000, "settings": {"max_result_chars": 500}}, 500),
        ({}, 4000),
    ],
)
async def test_the_limit_of_the_python_tool_is_that_of_its_section(values, section, length):
    environment = build({"tool": "python", **section})
    call = "<think>a</think><python>print('a' * 6000)</python>"
    transcript = await environment.execute(environment.begin("q").append(*environment.protocol.read_text(call)))
    assert len(transcript.calls[0].result) == length


def test_an_opening_that_would_be_ignored_is_refused(values):
    with pytest.raises(ConfigError, match="opening=<think> has no effect with protocol=native"):
        build_section(RunConfig, values | {"environment": {"protocol": "native", "opening": "<think>"}})


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ("searching", "'searching' is neither a built-in tool"),
        (
            {"tool": "calculator", "is_session": True},
            "is_session=true has no effect with tool=calculator: set tool=python",
        ),
    ],
)
def test_malformed_sections_are_refused(values, section, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build_section(RunConfig, values | {"environment": {"tools": [section]}})


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ("tools.py:number", "neither a tool nor a function"),
        ("tools.py:missing", "neither a tool nor a function"),
        ({"tool": "tools.py:search", "settings": {"word": "a"}}, "has settings, which only a function that builds"),
        ({"tool": "tools.py:build", "settings": {"words": "a"}}, "unexpected keyword argument 'words'"),
        ({"tool": "python", "settings": {"wal_s": 5}}, "did you mean 'wall_s'"),
        ({"tool": "python", "settings": {"wall_s": -5}}, "settings: wall_s must be greater than 0"),
    ],
)
def test_tools_that_cannot_be_built_are_named(values, section, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build(section)


def test_a_missing_file_of_a_tool_is_found_before_the_model_loads(values):
    config = build_section(RunConfig, values | {"environment": {"tools": ["none.py:search"]}})
    with pytest.raises(ConfigError, match=r"environment\.tools.* no file 'none\.py'"):
        check_paths(config)
    assert isinstance(config, RunConfig)
