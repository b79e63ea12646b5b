"""vLLM's process ends with the command, also with one that fails, while a notebook keeps the traceback."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tunesmith import JudgeOutput, WorkflowOutput
from tunesmith.commands.check.run import check
from tunesmith.commands.collect.run import collect
from tunesmith.commands.eval.compare import run_eval
from tunesmith.commands.pass_rate import measure_pass_rates
from tunesmith.commands.tune.tune import run_tuning
from tunesmith.config import CollectConfig, FlywheelConfig, RunConfig
from tunesmith.errors import ConfigError, RolloutError
from tunesmith.et_agent.flywheel.run import run_stage
from tunesmith.rollout.chat_model import ChatModel
from tunesmith.runs.load_config import build_section

FAKE = Path(__file__).parents[1] / "fake_vllm"
JUDGE = """
async def judge(task, response):
    raise OSError("down")
"""

AGENT = """
from tunesmith import WorkflowOutput


async def ask(task, model):
    await model([{"role": "user", "content": task["question"]}])
    return WorkflowOutput(reward=1.0)
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


def gather(values, data):
    config = build_section(CollectConfig, values | {"train_dataset": data})
    collect(config, workflow=ask, judge=judge, build_model=ChatModel, out=Path("out.jsonl"))


def turn_flywheel(values, data):
    config = build_section(
        FlywheelConfig, values | {"train_dataset": data, "judge": "judge.py:judge", "environment": {"tools": []}}
    )
    run_stage(config, out_dir=Path("out"), choose_model=lambda config: ChatModel)


@pytest.fixture
def engines(tmp_path, monkeypatch) -> Path:
    """Where processes of vLLM have their folders."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKE), os.environ.get("PYTHONPATH", "")]))
    engines = tmp_path / "engines"
    engines.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(engines))
    return engines


@pytest.fixture
def values(pocket_folder) -> dict[str, Any]:
    model = {"path": str(pocket_folder), "max_model_len": 1024, "max_tokens": 4, "device": "cpu"}
    return {"model": model, "engine": {"kind": "vllm"}, "rollout": {"chat_model": "openai"}}


@pytest.mark.parametrize("command", [evaluate, measure, gather, turn_flywheel])
def test_vllm_ends_with_a_command_that_fails(command, values, engines, tmp_path):
    (tmp_path / "judge.py").write_text(JUDGE)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "Who?", "answer": "Ada"}) + "\n")
    with pytest.raises(RolloutError, match="OSError: down") as failed:
        command(values, {"path": "rows.jsonl"})
    assert not list(engines.iterdir()), "the process removes its folder"
    assert failed.tb is not None, "the traceback, which refers to the engine, is still there"


def test_vllm_ends_with_a_training_that_cannot_begin(values, engines, tmp_path, monkeypatch):
    installed = tmp_path / "site" / "vllm-0.26.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.26.0\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "Who?"}) + "\n")
    model = values["model"] | {"max_model_len": 4}
    config = build_section(RunConfig, values | {"model": model, "train_dataset": {"path": "rows.jsonl"}})
    with pytest.raises(ConfigError, match="too small for a reply") as failed:
        run_tuning(config, workflow=ask, judge=judge, build_model=ChatModel)
    assert not list(engines.iterdir())
    assert failed.tb is not None


def test_vllm_ends_with_a_check(values, engines, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    config = build_section(RunConfig, values | {"workflow": "agent.py:ask"})
    assert check(config, task={"question": "Who?"}).reward == 1.0
    assert not list(engines.iterdir())
