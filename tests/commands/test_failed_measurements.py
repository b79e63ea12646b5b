"""vLLM's process ends with the command that fails, also while a notebook keeps the traceback."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from tunesmith import JudgeOutput, WorkflowOutput
from tunesmith.commands.eval.compare import run_eval
from tunesmith.commands.pass_rate import measure_pass_rates
from tunesmith.config import FlywheelConfig, RunConfig
from tunesmith.errors import RolloutError
from tunesmith.et_agent.flywheel.run import run_stage
from tunesmith.rollout.chat_model import ChatModel
from tunesmith.runs.load_config import build_section

FAKE = Path(__file__).parents[1] / "fake_vllm"
JUDGE = """
async def judge(task, response):
    raise OSError("down")
"""


async def ask(task, model):
    completion = await model([{"role": "user", "content": task["question"]}])
    return WorkflowOutput(response=completion.choices[0].message.content)


async def judge(task, response) -> JudgeOutput:
    raise OSError("down")


def evaluate(values, data):
    config = build_section(RunConfig, values | {"eval_datasets": {"a": data}})
    run_eval(config, build_model=ChatModel, workflow=ask, judge=judge)


def measure(values, data):
    config = build_section(RunConfig, values | {"train_dataset": data})
    measure_pass_rates(
        config, workflow=ask, judge=judge, build_model=ChatModel, field="rate", num_runs=1,
        out=Path("out.jsonl"),
    )  # fmt: skip


def turn_flywheel(values, data):
    config = build_section(
        FlywheelConfig, values | {"train_dataset": data, "judge": "judge.py:judge", "environment": {"tools": []}}
    )
    run_stage(config, out_dir=Path("out"), choose_model=lambda config: ChatModel)


@pytest.mark.parametrize("command", [evaluate, measure, turn_flywheel])
def test_vllm_ends_with_a_command_that_fails(command, tmp_path, pocket_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKE), os.environ.get("PYTHONPATH", "")]))
    engines = tmp_path / "engines"
    engines.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(engines))
    (tmp_path / "judge.py").write_text(JUDGE)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "Who?", "answer": "Ada"}) + "\n")
    model = {"path": str(pocket_folder), "max_model_len": 1024, "max_tokens": 4, "device": "cpu"}
    values = {"model": model, "engine": {"kind": "vllm"}, "rollout": {"chat_model": "openai"}}
    with pytest.raises(RolloutError, match="OSError: down") as failed:
        command(values, {"path": "rows.jsonl"})
    assert not list(engines.iterdir()), "the process removes its folder"
    assert failed.tb is not None, "the traceback, which refers to the engine, is still there"
