"""Operators of Data-Juicer on tasks and rollouts, by its own package: in this interpreter or `DATA_JUICER_PYTHON`."""

from __future__ import annotations

import importlib.util
import json
import os
import sys

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse

from chat_servers import ChatServer, build_completion
from tunesmith.config import ExperienceSection, OperatorSection
from tunesmith.data_juicer import apply_recipe
from tunesmith.errors import ConfigError, DataError
from tunesmith.experience.operators import data_juicer as score_rollouts
from tunesmith.experience.table import apply_operators, build_operators
from tunesmith.tasks.operators import data_juicer
from tunesmith.types import Group, Task, Trajectory

HAS_OWN = importlib.util.find_spec("data_juicer") is not None
PYTHON = os.environ.get("DATA_JUICER_PYTHON") or (sys.executable if HAS_OWN else None)
needs_package = pytest.mark.skipif(PYTHON is None, reason="needs Data-Juicer, which the extra `data-juicer` installs")
LENGTHS = [{"text_length_filter": {"min_len": 3, "max_len": 10}}]


def tasks_of(*questions):
    return [Task(task_id=f"t/{i}", index=i, row={"question": q, "answer": i}) for i, q in enumerate(questions)]


@pytest.fixture
def scorer(monkeypatch):
    """A model that scores quality 4 of 5, and gives no verdict on a response with the word silent."""

    async def answer(request: Request) -> JSONResponse:
        text = json.dumps((await request.json())["messages"][1:])
        scores = dict.fromkeys(("accuracy", "grammar", "informativeness", "coherence"), 4)
        reply = "no" if "silent" in text else json.dumps({"dimension_scores": scores, "flags": [], "rationale": "r"})
        return JSONResponse(build_completion("m", reply))

    server = ChatServer(answer)
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
    yield server
    server.close()


@pytest.mark.skipif(HAS_OWN, reason="Data-Juicer is installed")
def test_without_the_package_the_extra_is_named():
    with pytest.raises(ConfigError, match=r"No module named 'data_juicer': pip install 'tunesmith\[data-juicer\]'"):
        data_juicer(tasks_of("a"), process=LENGTHS)


def test_an_interpreter_that_cannot_run_is_named():
    with pytest.raises(ConfigError, match="python='/no/python' cannot be run"):
        apply_recipe([], LENGTHS, text_key="text", num_proc=1, python="/no/python")


def test_a_recipe_without_operators_is_refused(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("np: 2\n")
    recipe.with_name("own.yaml").write_text("process: [{text_length_filter: {min_len: 3}}]\n")
    for args, message in [
        ({}, "needs config_path, a file with the key process, or operators"),
        ({"config_path": str(recipe)}, "needs config_path, a file with the key process"),
        ({"config_path": str(tmp_path / "none")}, "cannot be read"),
        ({"config_path": str(recipe.with_name("own.yaml")), "operators": LENGTHS}, "or operators"),
    ]:
        section = ExperienceSection(operators=(OperatorSection(name="data_juicer", args=args),))
        with pytest.raises(ConfigError, match=message):
            build_operators(section, load=lambda name: None)


@needs_package
def test_tasks_are_filtered_and_numbers_become_fields():
    kept, metrics = data_juicer(tasks_of("ab", "a text", "x" * 20), process=LENGTHS, field="question", python=PYTHON)
    assert [(task.index, dict(task.row)) for task in kept] == [
        (1, {"question": "a text", "answer": 1, "text_len": 6.0})
    ]
    assert metrics == {"num_removed": 2.0, "num_failed": 0.0}


@needs_package
def test_rollouts_are_scored_by_a_model_and_rewards_shaped(tmp_path, scorer):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "process:\n  - llm_quality_score_filter:\n      api_or_hf_model: m\n      min_score: 0.0\n"
        "      input_keys: [prompt_text, response_text]\n      field_names: [prompt, response]\n      try_num: 1\n"
    )
    args = {"config_path": str(recipe), "np": 1, "python": PYTHON}
    shaping = {"reward_shaping_configs": [{"stats_key": "llm_quality_score", "op_type": "ADD", "weight": 1.0}]}
    section = ExperienceSection(
        operators=(
            OperatorSection(name="data_juicer", args=args),
            OperatorSection(name="reward_shaping_mapper", args=shaping),
        )
    )
    task = tasks_of("2 + 2 = ?")[0]
    runs = tuple(
        Trajectory(task=task, run_index=i, turns=(), reward=1.0, response_text=text)
        for i, text in enumerate(("It is 4.", "silent"))
    )
    [group], metrics = apply_operators(
        [Group(task=task, trajectories=runs)], build_operators(section, load=lambda name: None)
    )
    assert [run.reward for run in group.trajectories] == [pytest.approx(1.8), 1.0], "no verdict is not a score of 0"
    assert metrics["experience/data_juicer/num_failed"] == 1
    with pytest.raises(DataError, match="gave no score for any of 1 rows"):
        build_operators(section, load=lambda name: None)[0].apply([Group(task=task, trajectories=runs[1:])])


@needs_package
def test_an_unknown_operator_is_refused_before_a_row_is_read():
    with pytest.raises(ConfigError, match="Data-Juicer has no operator 'text_lenght_filter'"):
        data_juicer(tasks_of("a"), process=[{"text_lenght_filter": {}}], python=PYTHON)


def test_a_task_without_the_field_of_the_prompt_is_named():
    with_field, without = tasks_of("one")[0], Task(task_id="b/0", index=1, row={"problem": "two"})
    groups = [
        Group(task=task, trajectories=(Trajectory(task=task, run_index=0, turns=(), reward=1.0),))
        for task in (with_field, without)
    ]
    with pytest.raises(ConfigError, match="tasks have no field 'question'"):
        score_rollouts(groups, operators=LENGTHS)
