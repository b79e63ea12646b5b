"""Measures of behavior: values worked by hand, what they read and refuse, and their place in the results."""

from __future__ import annotations

import json
from statistics import fmean

import pytest
from typer.testing import CliRunner

from tunesmith.cli import app
from tunesmith.commands.eval.results import add_behavior, compute_evaluation
from tunesmith.config import BehaviorSection
from tunesmith.errors import ConfigError
from tunesmith.types import Distribution, Failure, Group, Task, Trajectory, Turn

TASK = Task(task_id="t/0", index=0, row={})


def run_of(index, reward, num_tokens=(100,), **metrics):
    turns = tuple(
        Turn(
            prompt_ids=(1,) * 9,
            sampled_ids=(2,) * each,
            logprobs=(-1.0,) * each,
            policy_versions=(0,) * each,
            distribution=Distribution(),
            stop_reason="eos",
        )
        for each in num_tokens
    )
    return Trajectory(
        task=TASK,
        run_index=index,
        turns=turns,
        reward=reward,
        metrics={name: float(value) for name, value in metrics.items()},
        failure=None if reward is not None else Failure(where="workflow", message="x"),
    )


def measure(*runs, outcome_key=None, **section):
    groups = [Group(task=TASK, trajectories=runs)]
    (group,) = add_behavior(groups, BehaviorSection(**section), outcome_key=outcome_key)
    return [run.metrics for run in group.trajectories]


@pytest.mark.parametrize(("correctness", "num_calls", "value"), [(1, 4, 0.25), (0.8, 0, 0.8), (1, 1, 1.0), (0, 3, 0.0)])
def test_efficiency_is_correctness_per_call_and_correctness_without_calls(correctness, num_calls, value):
    (found,) = measure(run_of(0, correctness, tool_calls=num_calls, tool_errors=0))
    assert found["efficiency"] == value


@pytest.mark.parametrize(("correctness", "num_errors", "value"), [(1, 0, 1.0), (1, 1, 1.0), (0.9, 3, 0.3), (0, 2, 0.0)])
def test_successful_execution_is_correctness_per_failed_call_from_the_second_on(correctness, num_errors, value):
    (found,) = measure(run_of(0, correctness, tool_calls=9, tool_errors=num_errors))
    assert found["successful_execution"] == pytest.approx(value)


@pytest.mark.parametrize(
    ("correctness", "num_tokens", "value"), [(1, 250, 4.0), (0.6, 200, 3.0), (0, 9, 0.0), (1, 0, None)]
)
def test_reasoning_length_is_correctness_per_thousand_tokens(correctness, num_tokens, value):
    (found,) = measure(run_of(0, correctness, (num_tokens,), tool_calls=0, tool_errors=0))
    assert found.get("reasoning_length") == value


def test_measures_are_read_from_metrics_and_sampled_tokens():
    first, second, failed = measure(
        run_of(0, 1.0, (60, 140), tool_calls=4, tool_errors=2),
        run_of(1, 0.0, tool_calls=0, tool_errors=0),
        run_of(2, None),
    )
    assert first == {
        "tool_calls": 4.0, "tool_errors": 2.0, "efficiency": 0.25, "successful_execution": 0.5, "reasoning_length": 5.0
    }  # fmt: skip
    assert (second["efficiency"], second["successful_execution"], second["reasoning_length"]) == (0.0, 0.0, 0.0)
    assert failed == {}


def test_metrics_of_several_tools_are_added_and_correctness_is_the_outcome_key():
    (found,) = measure(
        run_of(0, 0.1, f1=0.6, search=1, python=2, search_errors=1, python_errors=1),
        outcome_key="f1",
        tool_keys=("search", "python"),
        error_keys=("search_errors", "python_errors"),
    )
    assert found["efficiency"] == pytest.approx(0.2) and found["successful_execution"] == pytest.approx(0.3)


def test_the_mean_of_an_evaluation_is_over_scored_rollouts():
    runs = (
        run_of(0, 1.0, tool_calls=2, tool_errors=0),
        run_of(1, 1.0, tool_calls=1, tool_errors=0),
        run_of(2, None),
    )
    groups = add_behavior([Group(task=TASK, trajectories=runs)], BehaviorSection(), outcome_key=None)
    assert compute_evaluation("test", groups, policy_version=0).to_metrics()["eval/test/efficiency"] == 0.75
    assert add_behavior(groups, None, outcome_key=None) == groups


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"tool_errors": 0}, "'tool_calls' is not a metric of rollout 0 .*change evaluation.behavior.tool_keys"),
        ({"tool_calls": 0}, "'tool_errors' is not a metric of rollout 0 .*change evaluation.behavior.error_keys"),
        ({"tool_calls": 0, "tool_errors": 0, "efficiency": 1}, "report the metric 'efficiency'.*remove evaluation"),
    ],
)
def test_unknown_counts_and_names_in_use_are_refused(metrics, message):
    with pytest.raises(ConfigError, match=message):
        measure(run_of(0, 1.0, **metrics))


AGENT = """
from tunesmith import JudgeOutput, WorkflowOutput

async def ask(task, model):
    completion = await model([{"role": "user", "content": task["question"]}])
    text = completion.choices[0].message.content
    return WorkflowOutput(response=text, metrics={"tool_calls": len(text) % 4, "tool_errors": len(text) % 3})

async def judge(task, response):
    return JudgeOutput(reward=1.0)
"""


def test_a_comparison_reports_the_measures_with_intervals(tmp_path, monkeypatch, pocket_folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    rows = [{"question": f"Tom has {number} apples.", "answer": str(number)} for number in range(4)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "eval.yaml").write_text(
        json.dumps(
            {
                "models": {"pocket": pocket_folder},
                "workflow": "agent.py:ask",
                "judge": "agent.py:judge",
                "eval_datasets": {"test": {"path": str(tmp_path), "split": "test"}},
                "model": {"max_model_len": 128, "max_tokens": 6, "device": "cpu"},
                "rollout": {"chat_model": "openai"},
                "evaluation": {"behavior": {}},
                "has_progress": False,
            }
        )
    )
    result = CliRunner().invoke(app, ["eval", "eval.yaml", "--out", "compared"])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "compared/comparison.json").read_text())["test"]["models"]["pocket"]
    samples = [each for task in found["tasks"] for each in task["attempts"]]
    for name, value in {
        "efficiency": fmean(1 / max(each["metrics"]["tool_calls"], 1) for each in samples),
        "successful_execution": fmean(1 / max(each["metrics"]["tool_errors"], 1) for each in samples),
        "reasoning_length": fmean(1000 / each["sampled_tokens"] for each in samples),
    }.items():
        estimate = found["estimates"][name]
        assert estimate["mean"] == pytest.approx(value)
        assert estimate["interval"][0] <= estimate["mean"] <= estimate["interval"][1] and not estimate["is_share"]
    assert "| reasoning length" in (tmp_path / "compared/comparison.md").read_text()
