"""Runs with rollouts in flight over several steps (`rollout.max_staleness`)."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from tunesmith import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput, tune
from tunesmith.errors import ConfigError
from tunesmith.experience.store import load_rollouts
from tunesmith.model.checkpoint import RUN_STATE

PLAIN = ("rollout.chat_model=openai", "model.device=cpu", "engine.kv_cache_tokens=8192")
NUM_STEPS = 5


async def ask_several_times(task, model):
    """Rollouts of different lengths: from 1 to 7 calls, by the task and by what was sampled."""
    messages = [{"role": "user", "content": task["question"]}]
    left = 1 + 3 * (task["number"] % 3)
    while left > 0:
        reply = (await model(messages)).choices[0].message.content
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "and?"}]
        left -= 1 + (sum(map(ord, reply)) % 2)
    return WorkflowOutput(response=reply)


async def judge_length(task, response):
    return JudgeOutput(reward=float(sum(map(ord, response)) % 7))


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [{"question": f"Tom has {n} apples.", "number": n} for n in range(12)]
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.fixture
def run(tmp_path, data, pocket_folder):
    """Calls tune() with small settings; arguments and overrides may be given."""

    def call(*overrides, **arguments):
        defaults = {
            "workflow_func": ask_several_times,
            "judge_func": judge_length,
            "train_dataset": DatasetConfig(path=data, total_steps=NUM_STEPS),
            "model": TunerModelConfig(model_path=pocket_folder, max_model_len=256, max_tokens=6),
            "algorithm": AlgorithmConfig(group_size=2, batch_size=2, learning_rate=1e-3),
            "experiment_name": "x",
        }
        paths = (f"checkpoint_root_dir={tmp_path / 'runs'}", "rollout.max_staleness=1")
        return tune(**(defaults | arguments), overrides=(*PLAIN, *paths, *overrides))

    return call


def read_metrics(result, *, kind="train"):
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    kept = [row for row in rows if row["kind"] == kind]
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in kept]


def read_groups(result, step):
    return load_rollouts(result.folder / f"rollouts/step_{step:06d}.parquet")


def test_groups_continue_over_steps_and_nothing_too_old_is_trained(run):
    result = run()
    rows = read_metrics(result)
    lags = [
        step - 1 - version
        for step in range(1, NUM_STEPS + 1)
        for group in read_groups(result, step)
        for trajectory in group.trajectories
        for turn in trajectory.turns
        for version in turn.policy_versions
    ]
    assert set(lags) == {0, 1}
    assert [row["rollout/num_trajectories"] for row in rows] == [4] * NUM_STEPS
    assert max(row.get("staleness/max", 0) for row in rows) == 1
    assert any(row.get("correction/mean_weight", 1) != 1 for row in rows)
    assert rows[-1]["staleness/num_in_flight"] == 0, "the last step starts no task that no step would train"
    assert sum(row["staleness/num_overtaking_groups"] for row in rows) > 0
