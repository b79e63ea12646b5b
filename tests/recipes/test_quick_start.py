"""AgentScope's program in the docs, the quick start, and a workflow run with an ordinary chat model."""

from __future__ import annotations

import asyncio
import json
import runpy
from pathlib import Path

import httpx
import openai
import pytest
from transformers import AutoModelForCausalLM

from tunesmith.commands.sft.train import run_offline
from tunesmith.config import (
    ConversationDataSection,
    ModelSection,
    MonitorSection,
    RunConfig,
    SftConfig,
    SftTrainerSection,
)
from tunesmith.model.prepare import prepare_model
from tunesmith.rollout.signature import check_judge_function, check_workflow_function
from tunesmith.runs.load_config import load_section
from tunesmith.runs.load_function import load_function

pytest.importorskip("agentscope")

RECIPES = Path(__file__).parent.parent.parent / "recipes"
QUESTIONS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(32)]


@pytest.fixture(scope="module")
def brief_model(tmp_path_factory):
    """A pocket model fine-tuned to answer in a few words, so that a step of 256 rollouts takes seconds."""
    rows = [
        {
            "messages": [
                {"role": "system", "content": "You are a helpful math problem solving agent."},
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"]},
            ]
        }
        for row in QUESTIONS
    ]
    place = tmp_path_factory.mktemp("brief")
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    pocket = prepare_model("pocket", place / "pocket")
    config = SftConfig(
        model=ModelSection(path=str(pocket), max_model_len=512, device="cpu", dtype="float32"),
        train_dataset=ConversationDataSection(path=str(place / "rows.jsonl")),
        num_epochs=8,
        max_tokens_per_batch=512,
        trainer=SftTrainerSection(learning_rate=5e-3, schedule="constant", warmup_ratio=0),
        monitor=MonitorSection(trackers=(), has_progress=False),
    )
    return run_offline(config, out_dir=place / "sft").folder


@pytest.fixture
def in_dataset_folder(tmp_path, monkeypatch):
    """A current folder that holds `my_dataset`."""
    (tmp_path / "my_dataset").mkdir()
    text = "".join(json.dumps(row) + "\n" for row in QUESTIONS)
    (tmp_path / "my_dataset" / "train.jsonl").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read_only_record(folder):
    (run_folder,) = (folder / "checkpoints" / "AgentScope").glob("Experiment-*")
    (record,) = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return run_folder, record


def test_the_program_for_agentscope_runs(brief_model, in_dataset_folder):
    text = (RECIPES.parent / "docs" / "coming_from" / "agentscope.md").read_text(encoding="utf-8")
    program = text.partition("```python\n")[2].partition("```")[0]
    assert program.count("Qwen/Qwen3-0.6B") == 1
    (in_dataset_folder / "program.py").write_text(program.replace("Qwen/Qwen3-0.6B", str(brief_model)))
    runpy.run_path(str(in_dataset_folder / "program.py"))
    _, record = read_only_record(in_dataset_folder)
    assert record["rollout/num_failed"] == 0.0


def test_the_quick_start_runs_as_it_is_written(brief_model, in_dataset_folder, monkeypatch):
    monkeypatch.setenv("MODEL", str(brief_model))
    runpy.run_path(str(RECIPES / "math_agent" / "main.py"), run_name="__main__")
    run_folder, record = read_only_record(in_dataset_folder)
    assert 0.0 < record["rollout/reward_mean"] < 1.0
    assert record["rollout/num_failed"] == 0.0
    assert any((run_folder / "monitor" / "tensorboard").iterdir())
    AutoModelForCausalLM.from_pretrained(run_folder / "global_step_1")


def test_the_quick_start_differs_from_agentscopes_in_imports_and_paths_only():
    text = (RECIPES / "math_agent" / "main.py").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if "tunesmith" in line] == [
        "from tunesmith import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput, tune"
    ]


def test_a_workflow_runs_with_an_ordinary_chat_model(monkeypatch, capsys):
    def answer(request: httpx.Request) -> httpx.Response:
        question = json.loads(request.content)["messages"][-1]["content"][0]["text"]
        assert question == "What is 123 plus 456?"
        message = {"role": "assistant", "content": "123 plus 456 is 579."}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return httpx.Response(
            200, json={"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )

    recipe = runpy.run_path(str(RECIPES / "chat_model_outside" / "main.py"))
    monkeypatch.setenv("MODEL", "m")
    monkeypatch.setenv("BASE_URL", "http://model.invalid/v1")
    model = recipe["build_model"]()
    transport = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    model.client = openai.AsyncOpenAI(api_key="EMPTY", base_url="http://model.invalid/v1", http_client=transport)
    assert asyncio.run(recipe["try_once"](model)).reward == 1.0
    assert "judge reward: 1.0" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["math_agent/config.yaml", "pocket/config.yaml"])
def test_run_files_name_a_valid_workflow_and_judge(name, monkeypatch):
    monkeypatch.chdir(RECIPES.parent)
    monkeypatch.setenv("DEMO", "somewhere")
    config = load_section(RunConfig, RECIPES / name)
    check_workflow_function(load_function(config.workflow, knob="workflow"))
    check_judge_function(load_function(config.judge, knob="judge"))
