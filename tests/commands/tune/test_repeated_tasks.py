"""Fewer tasks than the batch size: a step repeats tasks, each repetition as its own group."""

from __future__ import annotations

import json

import pytest

from tunesmith import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput, tune
from tunesmith.commands.tune.plan import compute_total_steps
from tunesmith.experience.store import load_rollouts

PLAIN = ("rollout.chat_model=openai", "model.device=cpu", "engine.kv_cache_tokens=8192", "monitor.trackers=[]")
BOTS = {"selector_type": "difficulty_based", "kwargs": {"m": 4, "do_sample": True}}


async def ask(task, model):
    completion = await model([{"role": "user", "content": task["question"]}])
    return WorkflowOutput(response=completion.choices[0].message.content)


async def judge(task, response):
    return JudgeOutput(reward=float(sum(map(ord, response)) % 7) / 6)


@pytest.fixture
def data(tmp_path):
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in (2, 4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "train.jsonl")


@pytest.fixture
def run(tmp_path, data, pocket_folder):
    def call(*overrides, name, selector=None, is_resumed=False, **length):
        return tune(
            workflow_func=ask,
            judge_func=judge,
            train_dataset=DatasetConfig(path=data, task_selector=selector, **length),
            model=TunerModelConfig(model_path=pocket_folder, max_model_len=128, max_tokens=4),
            algorithm=AlgorithmConfig(group_size=3, batch_size=5, learning_rate=1e-3, save_interval_steps=1),
            experiment_name=name,
            continue_from_checkpoint=is_resumed,
            overrides=(*PLAIN, f"checkpoint_root_dir={tmp_path / 'runs'}", *overrides),
        )

    return call


def read_metrics(result):
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


def test_two_tasks_fill_a_batch_of_five(run, capsys):
    result = run(name="short")
    assert result.num_steps == 1
    note = "2 training tasks are fewer than algorithm.batch_size=5: each step repeats tasks to fill its batch"
    assert note in capsys.readouterr().err
    groups = load_rollouts(result.folder / "rollouts/step_000001.parquet")
    assert sorted(group.task.task_id for group in groups) in (
        ["train/0"] * 3 + ["train/1"] * 2,
        ["train/0"] * 2 + ["train/1"] * 3,
    )
    assert [len(group.trajectories) for group in groups] == [3] * 5
    sampled = {tuple(turn.sampled_ids for turn in run.turns) for group in groups for run in group.trajectories}
    assert len(sampled) > 6, "every repetition is sampled independently"
    assert result.metrics["rollout/num_trajectories"] == 15


def test_repeated_tasks_are_selected_fed_back_and_resumed(run):
    overrides = ("experience.refill_budget=2", "experience.replay.num_groups=2")
    whole = run(*overrides, name="whole", selector=BOTS, total_steps=3)
    killed = run(*overrides, name="killed", selector=BOTS, total_steps=3)
    chosen = json.loads((whole.folder / "selection/step_000001.json").read_text())["choices"]
    groups = load_rollouts(whole.folder / "rollouts/step_000001.parquet")
    assert [choice["task_id"] for choice in chosen] == [group.task.task_id for group in groups]
    assert read_metrics(whole)[0]["selector/num_feedback"] == 2, "each task gets one feedback value, its mean"
    assert killed.num_steps == 3
    resumed = run(*overrides, "resume_from_step=1", name="killed", selector=BOTS, total_steps=3, is_resumed=True)
    assert read_metrics(resumed) == read_metrics(whole)


@pytest.mark.parametrize(("epochs", "num_tasks", "steps"), [(1, 2, 1), (8, 2, 3), (1, 5, 1), (2, 14, 5), (1, 4, 1)])
def test_whole_batches_and_at_least_one(epochs, num_tasks, steps):
    assert compute_total_steps(epochs, num_tasks=num_tasks, batch_size=5) == steps
