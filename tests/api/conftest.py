"""Tasks, functions and configs of small runs on the untrained pocket model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tunesmith import RunConfig
from tunesmith.config import (
    AlgorithmSection,
    DatasetSection,
    EngineSection,
    ModelSection,
    MonitorSection,
    RolloutSection,
    TrainerSection,
)

FUNCTIONS = """
from tunesmith import JudgeOutput, WorkflowOutput

async def ask(task, model):
    completion = await model([{"role": "user", "content": task["question"]}])
    return WorkflowOutput(response=completion.choices[0].message.content)

async def judge(task, response):
    return JudgeOutput(reward=len(response) % 3 / 2, metrics={"from_file": 1.0})
"""


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    rows = [{"question": f"Tom has {n} apples. How many?", "answer": str(n)} for n in range(6)]
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def functions(tmp_path: Path) -> str:
    """Path of a file with a workflow and a judge."""
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return str(path)


@pytest.fixture
def config(tmp_path: Path, tasks: str, pocket_folder: str) -> RunConfig:
    return RunConfig(
        name="x",
        checkpoint_root_dir=str(tmp_path / "runs"),
        total_steps=2,
        model=ModelSection(path=pocket_folder, max_model_len=128, max_tokens=4, device="cpu"),
        train_dataset=DatasetSection(path=tasks),
        eval_datasets={"test": DatasetSection(path=tasks)},
        algorithm=AlgorithmSection(group_size=4, batch_size=2, kl_coef=1e-3),
        trainer=TrainerSection(learning_rate=1e-3),
        engine=EngineSection(kv_cache_tokens=8192),
        rollout=RolloutSection(chat_model="openai"),
        monitor=MonitorSection(trackers=(), has_progress=False),
    )
