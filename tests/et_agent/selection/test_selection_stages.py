"""Stages pass_rate and pareto: rollouts with their numbers, and the questions that they select."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tunesmith.cli import app
from tunesmith.config import ParetoSection
from tunesmith.errors import ConfigError, DataError
from tunesmith.et_agent.selection.pareto import run_stage
from tunesmith.runs.load_config import build_section

AGENT = """
from pathlib import Path

from tunesmith import JudgeOutput, WorkflowOutput

async def agent(task, model):
    completion = await model([{"role": "user", "content": task["question"]}])
    if Path("stop").exists() and task["number"] >= 4:
        raise KeyboardInterrupt
    text = completion.choices[0].message.content
    return WorkflowOutput(response=text, metrics={"searches": float(sum(map(ord, text)) % 4), "python": 1.0})

async def judge(task, response):
    return JudgeOutput(reward=float(sum(map(ord, response)) % 2) if task["number"] else 1.0)
"""


@pytest.fixture
def workdir(tmp_path, monkeypatch, pocket_folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    rows = [{"question": f"{n} apples", "number": n, "source": "ab"[n % 2]} for n in range(9)]
    (tmp_path / "pool.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stages = {
        "pass_rate": {
            "workflow": "agent.py:agent",
            "judge": "agent.py:judge",
            "model": {"path": str(pocket_folder), "max_model_len": 64, "max_tokens": 4, "device": "cpu"},
            "engine": {"kv_cache_tokens": 4096},
            "rollout": {"chat_model": "openai"},
            "train_dataset": {"path": "pool.jsonl"},
            "algorithm": {"batch_size": 2},
            "num_runs": 6,
            "max_tasks": 8,
            "tool_keys": ["searches", "python"],
        },
        "pareto": {"data": "stage:pass_rate/tasks.jsonl", "num_selected": 4, "stratify_by": "source"},
    }
    (tmp_path / "pipeline.yaml").write_text(json.dumps({"folder": "out", "stages": stages}))
    return tmp_path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_questions_are_measured_and_selected_and_a_killed_measurement_resumes(workdir):
    (workdir / "stop").write_text("")
    CliRunner().invoke(app, ["run", "pipeline.yaml"])
    assert not (workdir / "out/pass_rate/tasks.jsonl").exists()
    done = (workdir / "out/pass_rate/tasks.jsonl.part").read_text()
    assert len(done.splitlines()) == 2
    (workdir / "stop").unlink()
    result = CliRunner().invoke(app, ["run", "pipeline.yaml"])
    assert result.exit_code == 0, result.output
    rows = read(workdir / "out/pass_rate/tasks.jsonl")
    assert [row["number"] for row in rows] == list(range(8))
    first = [record for line in done.splitlines() for record in json.loads(line)]
    assert [row["pass_rate_correctness"] for row in rows[:4]] == [record[2] for record in first]
    for row in rows:
        assert len(row["pass_rate_tool_calls"]) == len(row["pass_rate_correctness"]) == 6
        assert row["pass_rate"] == pytest.approx(sum(row["pass_rate_correctness"]) / 6)
        assert min(row["pass_rate_tool_calls"]) >= 1
    selected = read(workdir / "out/pareto/train.jsonl")
    assert 0 < len(selected) <= 4 and all(0 < row["pass_rate"] < 1 for row in selected)
    assert [row["pareto_front"] for row in selected] == sorted(row["pareto_front"] for row in selected)
    report = (workdir / "out/report.md").read_text()
    assert "- selected questions: 4" in report and "- tasks with a scored rollout: 8" in report


def test_a_pareto_stage_refuses_missing_fields_and_questions_without_mixed_outcomes(tmp_path):
    path = tmp_path / "rows.jsonl"

    def select(row, **values):
        path.write_text(json.dumps(row) + "\n")
        section = ParetoSection(data=str(path), **values)
        return run_stage(section, out_dir=tmp_path / "out", choose_model=lambda config: None).figures

    with pytest.raises(DataError, match=r"row 0 of .* has no 'pass_rate_correctness'.*one number for each rollout"):
        select({"question": "q"})
    numbers = {"pass_rate_correctness": [1, 0], "pass_rate_tool_calls": [1, 2]}
    with pytest.raises(DataError, match="no 'source'; its fields are .*change stratify_by"):
        select(numbers, stratify_by="source")
    with pytest.raises(DataError, match="no question of .* has a right and a wrong rollout"):
        select(numbers | {"pass_rate_correctness": [1, 1]})
    with pytest.raises(DataError, match="row 0 of .* has a number that is not finite in 'scores'"):
        select(numbers | {"scores": {"f1": [0.5, float("nan")]}})
    assert select(numbers)["selected questions"] == 1
    assert read(tmp_path / "out" / "train.jsonl")[0]["pareto_distance"] == 0


def test_shares_need_strata():
    with pytest.raises(ConfigError, match="shares has no effect without stratify_by"):
        build_section(ParetoSection, {"data": "x", "shares": {"a": 1}})
