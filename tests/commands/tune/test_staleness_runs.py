"""Runs with rollouts in flight over several steps (`rollout.max_staleness`)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time

import openai
import pytest

from small_runs import build_small_run, write_splits
from tunesmith import AlgorithmConfig, DatasetConfig, Stop, TunerModelConfig, WorkflowOutput
from tunesmith.errors import ConfigError
from tunesmith.experience.store import load_rollouts
from tunesmith.model.checkpoint import RUN_STATE
from tunesmith.trainer.trainer import Trainer

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


@pytest.fixture
def data(tmp_path):
    return write_splits(tmp_path / "data", [{"question": f"Tom has {n} apples.", "number": n} for n in range(12)])


@pytest.fixture
def run(tmp_path, data, pocket_folder):
    """Calls tune() with small settings; arguments and overrides may be given."""
    algorithm = AlgorithmConfig(group_size=2, batch_size=2, learning_rate=1e-3)
    return build_small_run(
        tmp_path, pocket_folder, data, "rollout.max_staleness=1", steps=NUM_STEPS, max_model_len=256, max_tokens=6,
        workflow_func=ask_several_times, algorithm=algorithm,
    )  # fmt: skip


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
    for line in (result.folder / "metrics.jsonl").read_text().splitlines():
        if (row := json.loads(line))["kind"] == "train":
            rate = row["engine/num_sampled_tokens"] / row["perf/rollout_s"]
            assert row["perf/sampled_tokens_per_s"] == pytest.approx(rate), "not of tokens sampled in earlier steps"


def test_equal_seeds_give_equal_runs(run):
    first, second = run("rollout.max_staleness=2"), run("rollout.max_staleness=2", experiment_name="y")
    assert read_metrics(first) == read_metrics(second)
    for step in range(1, NUM_STEPS + 1):
        one, other = read_groups(first, step), read_groups(second, step)
        assert [[t.turns for t in g.trajectories] for g in one] == [[t.turns for t in g.trajectories] for g in other]


def test_a_kept_cache_trains_and_is_no_mismatch(run):
    result = run("rollout.stale_cache=keep", "trainer.mismatch_stop=1e-3")
    groups = [group for step in range(1, NUM_STEPS + 1) for group in read_groups(result, step)]
    turns = [turn for group in groups for run in group.trajectories for turn in run.turns]
    assert {len(set(turn.policy_versions)) for turn in turns} == {1}
    assert max(row.get("staleness/max", 0) for row in read_metrics(result)) == 1


def stop_after_three(record):
    return Stop("enough") if record.step == 3 else None


def test_a_resumed_run_names_what_was_in_flight_and_loses_no_task(run, data, capsys, tmp_path):
    """Each epoch has every task once, so 6 steps of 2 tasks train all 12. Resuming twice gives the same run."""
    total = {"train_dataset": DatasetConfig(path=data, total_steps=6)}
    stopped = run(on_step_end=stop_after_three, **total)
    assert stopped.num_steps == 3
    assert "2 groups in flight were cancelled" in capsys.readouterr().err
    state = json.loads((stopped.folder / "global_step_3" / RUN_STATE).read_text())["in_flight"]
    assert len(state["tasks"]) == 2 and state["num_started"] >= 8
    shutil.copytree(tmp_path / "runs", tmp_path / "copy")
    resumed = run(continue_from_checkpoint=True, **total)
    names = ", ".join(f"train/{index}" for index in state["tasks"])
    printed = " ".join(capsys.readouterr().err.split())
    assert f"2 groups in flight were dropped; their tasks run again: {names}" in printed
    again = run(f"checkpoint_root_dir={tmp_path / 'copy'}", continue_from_checkpoint=True, **total)
    rows = read_metrics(resumed)
    assert read_metrics(again) == rows
    assert [row["staleness/num_requeued_tasks"] for row in rows] == [0, 0, 0, 2, 0, 0]
    trained = [group.task.index for step in range(1, 7) for group in read_groups(resumed, step)]
    assert sorted(trained) == list(range(12))
    assert json.loads((resumed.folder / "global_step_6" / RUN_STATE).read_text())["in_flight"]["tasks"] == []


def test_evaluations_see_the_weights_of_their_step_and_nothing_in_flight(run, data):
    """An evaluation during the run equals that of its checkpoint before the first step of another run."""
    held_out = {"eval_dataset": DatasetConfig(path=data, split="test")}
    result = run("evaluation.interval_steps=2", "save_interval_steps=2", "total_steps=3", **held_out)
    model = TunerModelConfig(model_path=str(result.folder / "global_step_2"), max_model_len=256, max_tokens=6)
    alone = run("evaluation.at_start=true", "total_steps=1", model=model, experiment_name="alone", **held_out)
    (during,) = [row for row in read_metrics(result, kind="eval") if row["step"] == 2]
    before = read_metrics(alone, kind="eval")[0]
    assert before["step"] == 0
    assert {**during, "step": 0} == before


def test_refills_selectors_and_replay_work_with_rollouts_in_flight(run, data):
    result = run(
        "experience.refill_budget=2",
        "experience.replay.num_groups=1",
        "experience.replay.max_staleness=1",
        "train_dataset.task_selector.selector_type=difficulty_based",
        workflow_func=fail_sometimes,
    )
    rows = read_metrics(result)
    assert sum(row["experience/num_replayed_groups"] for row in rows) > 0
    assert max(row.get("staleness/max", 0) for row in rows) == 1
    assert sum(row["rollout/num_failed_workflow"] for row in rows) > 0
    assert all(row["selector/num_feedback"] <= row["experience/num_tasks_tried"] for row in rows)


async def fail_sometimes(task, model):
    output = await ask_several_times(task, model)
    if task["number"] == 4:
        raise ValueError("four")
    return output


def test_a_signal_during_the_update_saves_its_step_and_ends_the_run(run, monkeypatch, capsys):
    """The update is made in a thread; the run waits for it, cancels what is in flight, and names its checkpoint."""
    step, made = Trainer.step, []

    def interrupt(self, *arguments, **options):
        if len(made) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        metrics = step(self, *arguments, **options)
        made.append(self.num_steps)
        return metrics

    monkeypatch.setattr(Trainer, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run()
    printed = capsys.readouterr().err
    assert made == [1, 2, 3] and "groups in flight were cancelled" in printed
    assert "the last checkpoint is" in printed and "global_step_3" in printed


def test_timers_of_agents_fire_while_the_run_trains(run, monkeypatch):
    """An agent that counts in short sleeps goes on counting during the update."""
    ticks, during = [0], []

    async def count(task, model):
        await model([{"role": "user", "content": "hi"}])
        for _ in range(task["number"] % 2 * 100):
            await asyncio.sleep(0.002)
            ticks[0] += 1
        return WorkflowOutput(response=str(task["number"]))

    step = Trainer.step

    def step_slowly(self, *arguments, **options):
        before, ends_at = ticks[0], time.monotonic() + 5
        while max(during, default=0) <= 5 and ticks[0] - before <= 5 and time.monotonic() < ends_at:
            time.sleep(0.005)
        during.append(ticks[0] - before)
        return step(self, *arguments, **options)

    monkeypatch.setattr(Trainer, "step", step_slowly)
    run(workflow_func=count)
    assert max(during) > 5, during


def test_agents_over_http_keep_their_server_over_steps_and_evaluations(run, data):
    urls = set()

    async def ask_over_http(task, model):
        urls.add(model.base_url)
        async with openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0) as client:
            messages = [{"role": "user", "content": task["question"]}]
            for _ in range(1 + task["number"] % 2):
                reply = await client.chat.completions.create(model=model.model_name, messages=messages)
        return WorkflowOutput(response=reply.choices[0].message.content)

    held_out = {"eval_dataset": DatasetConfig(path=data, split="test")}
    result = run(
        "rollout.http_port=0", "evaluation.interval_steps=1", "total_steps=3", workflow_func=ask_over_http, **held_out
    )
    assert all(row["rollout/num_failed"] == 0 for row in read_metrics(result))
    assert all(row["eval/eval_taskset/num_failures"] == 0 for row in read_metrics(result, kind="eval"))
    assert len(urls) == 1 and urls.pop().startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("algorithm.algorithm_type=opo",), "'opo': it is defined for tokens of the current weights only"),
        (("algorithm.algorithm_type=remax",), "'remax': it is defined for tokens of the current weights only"),
        (
            ("rollout.max_staleness=0", "experience.replay.num_groups=1", "algorithm.algorithm_type=opo"),
            "experience.replay.num_groups=1 does not work with algorithm.algorithm_type='opo'",
        ),
        (("rollout.branching={}", "algorithm.group_size=4"), "does not work with rollout.branching"),
        (("experience.replay.num_groups=1",), "does not work with experience.replay.max_staleness=4: replayed"),
        (("rollout.max_staleness=0", "rollout.stale_cache=keep"), "stale_cache=keep has no effect with"),
    ],
)
def test_what_cannot_be_stale_is_refused_before_a_model_loads(run, tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        run(*overrides)
    assert not (tmp_path / "runs").exists()


def test_a_cap_of_importance_weights_has_an_effect_with_staleness(run):
    with pytest.raises(ConfigError, match="has no effect"):
        run("rollout.max_staleness=0", "algorithm.correction.cap=3")
    assert run("algorithm.correction.cap=3").num_steps == NUM_STEPS
