"""The report of a pipeline shows the behavior of all evaluated models in one table and one chart."""

from __future__ import annotations

import importlib.util
import json

import pytest
from typer.testing import CliRunner

from tunesmith.cli import app
from tunesmith.commands.eval.radar import format_radar, merge_radars
from tunesmith.commands.eval.radar_plot import compute_radius, find_largest_means, save_radar_plot

AGENT = """
from tunesmith import JudgeOutput, WorkflowOutput

async def agent(task, model):
    completion = await model([{"role": "user", "content": task["question"]}])
    text = completion.choices[0].message.content
    return WorkflowOutput(response=text, metrics={"tool_calls": float(task["number"] % 3), "tool_errors": 0.0})

async def judge(task, response):
    return JudgeOutput(reward=float(task["number"] % 2), metrics={"brief": 1.0})
"""


def make_axes(scale):
    names = ("accuracy", "efficiency", "conciseness", "successful_execution", "reasoning_length")
    return {name: [scale * i, scale * i - 0.1, scale * i + 0.1] for i, name in enumerate(names, start=1)}


def test_stages_are_merged_and_different_models_of_one_label_keep_apart():
    one, two = {"test": {"base": make_axes(0.1), "sft": make_axes(0.2)}}, {"test": {"base": make_axes(0.1)}}
    assert merge_radars({"e1": one, "e2": two}) == one
    three = {"test": {"sft": make_axes(0.3)}, "hard": {"sft": make_axes(0.3)}}
    merged = merge_radars({"e1": one, "e2": three})
    assert list(merged["test"]) == ["base", "sft", "sft (e2)"] and list(merged["hard"]) == ["sft"]


def test_the_table_has_a_row_for_each_model_and_a_dash_for_a_missing_axis():
    axes = make_axes(0.1)
    del axes["conciseness"]
    lines = format_radar({"test": {"base": make_axes(0.1), "rl": axes}}).splitlines()
    assert "successful execution" in lines[2] and lines[4].startswith("| base ")
    assert lines[5].split("|")[4].strip() == "-" and lines[5].split("|")[2].strip() == "0.1 (0 - 0.2)"


def test_axes_are_scaled_by_the_largest_mean():
    models = {"a": {"accuracy": [0.5, 0, 1]}, "b": {"accuracy": [0.25, 0, 1], "efficiency": [-1.0, -2, 0]}}
    assert find_largest_means(models, ["accuracy", "efficiency"]) == {"accuracy": 0.5, "efficiency": 0.0}
    assert (compute_radius(0.25, 0.5), compute_radius(-1, 0.5), compute_radius(0, 0)) == (0.5, 0, 0)


def test_the_chart_is_a_png_file_and_needs_three_axes(tmp_path):
    pytest.importorskip("matplotlib")
    assert save_radar_plot(tmp_path / "r.png", {"test": {"a": make_axes(0.1), "b": make_axes(0.2)}})
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert not save_radar_plot(tmp_path / "no.png", {"test": {"a": {"accuracy": [1, 1, 1]}}})
    assert not (tmp_path / "no.png").exists()


@pytest.fixture
def run(tmp_path, monkeypatch, pocket_folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    rows = [{"question": f"{n} apples", "number": n} for n in range(4)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = {
        "kind": "eval", "workflow": "agent.py:agent", "judge": "agent.py:judge",
        "model": {"max_model_len": 64, "max_tokens": 4, "device": "cpu"},
        "engine": {"kv_cache_tokens": 4096}, "rollout": {"chat_model": "openai"}, "has_progress": False,
        "eval_datasets": {"test": {"path": "test.jsonl"}},
        "evaluation": {"behavior": {"conciseness_key": "brief"}},
    }  # fmt: skip
    stages = {"one": stage | {"models": {"base": str(pocket_folder)}}}
    stages["two"] = stage | {"models": {"again": str(pocket_folder)}}
    (tmp_path / "pipeline.yaml").write_text(json.dumps({"folder": "out", "stages": stages}))

    def call():
        result = CliRunner().invoke(app, ["run", "pipeline.yaml"])
        assert result.exit_code == 0, result.output
        return (tmp_path / "out" / "report.md").read_text()

    return call


def test_the_report_of_a_pipeline_has_the_models_of_all_evaluations(run, tmp_path, monkeypatch):
    report = run()
    section = report[report.index("## Behavior of all models") :]
    assert "| base " in section and "| again " in section and "conciseness" in section
    assert section.count("### test") == 1 and "- radar:" not in report
    row = next(line for line in section.splitlines() if line.startswith("| base"))
    assert [cell.split()[0] for cell in row.split("|")[2:5]] == ["0.5", "0.5", "1"]
    if importlib.util.find_spec("matplotlib") is not None:
        assert "![behavior](radar.png)" in section and (tmp_path / "out" / "radar.png").exists()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert "radar.png is not drawn" in run()
