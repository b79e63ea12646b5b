"""`tunesmith eval --suite tir`: data files of other forms, and all measures of a pocket agent with a tool."""

from __future__ import annotations

import json
import statistics

import pytest
from typer.testing import CliRunner

from tunesmith import evaluate
from tunesmith.cli import app
from tunesmith.commands.eval.suites import load_suite_tasks
from tunesmith.config import DatasetSection
from tunesmith.errors import ConfigError, DataError

AGENT = """
from tunesmith.environments.tool_agent import tool_agent as ask_nobody
from tunesmith.environments.transcript import Segment
from tunesmith.environments.tool_agent import collect_metrics
from tunesmith import WorkflowOutput

async def look_up(query: str) -> str:
    "Look something up."
    return "All about " + query

async def agent(task, model, environment):
    '''Makes the calls of the task, then the model writes a few tokens, then the answer of the task.'''
    transcript = environment.begin(task["question"])
    for query in task["calls"]:
        call = environment.protocol.write_call("I search.", environment.tools["look_up"], query, number=0)
        transcript = await environment.execute(transcript.append(*call))
    transcript = await environment.run(task["question"], model, prefix=transcript)
    transcript = transcript.append(*environment.protocol.write_answer("I know.", task["says"]))
    return WorkflowOutput(response=transcript, metrics=collect_metrics(transcript, environment))
"""
ROWS = [
    {"question": "a", "answer": ["Paris", "the city of Paris"], "calls": ["x", "y"], "says": "Paris"},
    {"question": "b", "answer": "12", "calls": [], "says": "12.0"},
    {"question": "c", "answer": 7, "calls": ["x", "", ""], "says": "7"},
    {"question": "d", "answer": "Rome", "calls": ["x"], "says": "Oslo"},
]


@pytest.fixture
def workplace(tmp_path, monkeypatch, pocket_folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = {
        "models": {"pocket": pocket_folder},
        "workflow": "agent.py:agent",
        "environment": {"tools": ["agent.py:look_up"], "max_tokens": 5, "prompt": "none"},
        "model": {"max_model_len": 1024, "max_tokens": 5, "device": "cpu"},
        "eval_datasets": {"set": {"path": "test.jsonl"}},
        "engine": {"kv_cache_tokens": 4096},
        "rollout": {"chat_model": "openai"},
        "has_progress": False,
    }
    (tmp_path / "eval.yaml").write_text(json.dumps(config))
    return tmp_path


def test_the_suite_reports_answers_and_behavior_with_intervals(workplace):
    result = CliRunner().invoke(app, ["eval", "eval.yaml", "--suite", "tir", "--out", "out"])
    assert result.exit_code == 0, result.output
    saved = json.loads((workplace / "out/comparison.json").read_text())["set"]["models"]["pocket"]
    means = {name: each["mean"] for name, each in saved["estimates"].items()}
    tokens = [task["attempts"][0]["sampled_tokens"] for task in saved["tasks"]]
    assert means["reward"] == pytest.approx(3 / 4)
    assert means["em"] == pytest.approx(2 / 4), "12.0 is 12 for math-verify only"
    assert means["math_equal"] == 1.0
    assert saved["estimates"]["math_equal"]["num_tasks"] == 2
    assert means["tool_calls"] == pytest.approx((2 + 0 + 3 + 1) / 4)
    assert means["failed_calls"] == pytest.approx(2 / 4)
    assert means["failed_call_rate"] == pytest.approx((0 + 2 / 3 + 0) / 3)
    assert means["efficiency"] == pytest.approx((1 / 2 + 1 + 1 / 3 + 0) / 4)
    assert means["successful_execution"] == pytest.approx((1 + 1 + 1 / 2 + 0) / 4)
    expected = [1000 / tokens[0], 1000 / tokens[1], 1000 / tokens[2], 0.0]
    assert means["reasoning_length"] == pytest.approx(statistics.fmean(expected))
    for name in ("reward", "efficiency", "reasoning_length"):
        low, high = saved["estimates"][name]["interval"]
        assert low <= means[name] <= high and low < high
    assert evaluate("eval.yaml", suite="tir").metrics["set/pocket/efficiency"] == means["efficiency"]


def test_the_suite_has_a_judge_of_its_own(workplace):
    async def judge(task, response): ...

    with pytest.raises(ConfigError, match="has a judge of its own"):
        evaluate("eval.yaml", suite="tir", judge_func=judge)
    with pytest.raises(ConfigError, match="suite='gaia'; allowed: tir"):
        evaluate("eval.yaml", suite="gaia")


def load(path, rows):
    text = json.dumps(rows) if path.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text)
    return [task.row for task in load_suite_tasks(DatasetSection(path=str(path)), name="s")]


@pytest.mark.parametrize("name", ["test.jsonl", "test.json"])
def test_questions_and_answers_have_the_names_of_several_sets(tmp_path, name):
    rows = [
        {"question": "a", "answer": ["x", "y"]},
        {"problem": "b", "answer": 113, "id": 1},
        {"question": "c", "answer": "", "final_answer": ["\\frac{1}{2}"]},
        {"Question": "d", "Answer": "z"},
    ]
    found = load(tmp_path / name, rows)
    assert [(row["question"], row["answer"]) for row in found] == [
        ("a", ["x", "y"]), ("b", 113), ("c", ["\\frac{1}{2}"]), ("d", "z"),
    ]  # fmt: skip
    assert found[1]["id"] == 1


def test_a_row_without_an_answer_is_named(tmp_path):
    with pytest.raises(DataError, match=r"row 1 of .* has no answer: none of answer, final_answer"):
        load(tmp_path / "test.jsonl", [{"question": "a", "answer": "x"}, {"question": "b", "solution": "y"}])


def test_the_report_names_the_scorer_of_each_set(workplace):
    result = CliRunner().invoke(app, ["eval", "eval.yaml", "--suite", "tir_paper", "--out", "out"])
    assert result.exit_code == 0, result.output
    guessed = "scored 2 by token F1 and 2 by math-verify, chosen by their answers; fields.ability of the set decides"
    assert f"### set: 4 tasks, 1 rollout of each; {guessed}" in (workplace / "out/comparison.md").read_text()
    saved = json.loads((workplace / "out/comparison.json").read_text())["set"]
    assert saved["scorer"] == guessed
    means = {name: each["mean"] for name, each in saved["models"]["pocket"]["estimates"].items()}
    assert (means["math_equal"], means["paper_math_equal"]) == (1.0, 2 / 4), "12.0 is not 12 for ET-Agent"
    assert means["reward"] == 2 / 4
    overrides = ["eval_datasets.set.fields.ability=qa"]
    compared = evaluate("eval.yaml", suite="tir", overrides=overrides)
    assert compared.sets["set"].scorer == "scored by token F1"
    assert "set/pocket/math_equal" not in compared.metrics
