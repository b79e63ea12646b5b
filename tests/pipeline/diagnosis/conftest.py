"""Small runs of the untrained pocket model, most of them made to fail in one way."""

from __future__ import annotations

import contextlib
import json

import pytest

from tunesmith import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput, tune
from tunesmith.errors import TunesmithError
from tunesmith.pipeline.diagnosis.diagnose import diagnose


async def ask(task, model):
    completion = await model([{"role": "user", "content": task["question"]}])
    return WorkflowOutput(response=completion.choices[0].message.content)


async def judge_text(task, response):
    return JudgeOutput(reward=float(sum(map(ord, response)) % 7))


@pytest.fixture
def run(tmp_path, pocket_folder):
    """Calls tune() with small settings; returns the diagnosis, also of a run that stops with an error."""
    rows = [{"question": f"Tom has {n} apples. How many?"} for n in range(60)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def call(*overrides, steps=2, **arguments):
        defaults = {
            "workflow_func": ask,
            "judge_func": judge_text,
            "train_dataset": DatasetConfig(path=str(tmp_path / "train.jsonl"), total_steps=steps),
            "model": TunerModelConfig(model_path=pocket_folder, max_model_len=128, max_tokens=12),
            "algorithm": AlgorithmConfig(group_size=4, batch_size=4, learning_rate=1e-4),
            "experiment_name": "x",
        }
        fixed = (
            "rollout.chat_model=openai",
            "model.device=cpu",
            "engine.kv_cache_tokens=8192",
            "monitor.trackers=[]",
            "save_interval_steps=1000",
            f"checkpoint_root_dir={tmp_path / 'runs'}",
        )
        with contextlib.suppress(TunesmithError):
            tune(**(defaults | arguments), overrides=(*fixed, *overrides))
        return diagnose(tmp_path / "runs/AgentScope" / arguments.get("experiment_name", "x"))

    return call
