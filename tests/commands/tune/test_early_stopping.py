"""Runs with `early_stopping` and `keep_best`: where they end, what they keep, and that kills change neither."""

from __future__ import annotations

import json
import shutil
import signal
import textwrap

import pytest

from killed_runs import Zygote, read_metrics
from small_pocket import write_small_pocket
from tunesmith.config import RunConfig
from tunesmith.errors import ConfigError
from tunesmith.runs.load_config import build_section

AGENT = textwrap.dedent(
    """
    import os
    import signal
    from pathlib import Path

    from tunesmith import JudgeOutput, WorkflowOutput

    REWARDS = [0.1, 0.5, 0.9, 0.7, 0.8, 0.85, 0.2, 0.2, 0.2]  # of the held-out tasks after each step
    KILLS = ["step 1", "evaluation 2", "checkpoint 2", "step 4", "evaluation 5", "checkpoint 5"]
    step = 0

    async def workflow(task, model):
        completion = await model([{"role": "user", "content": task["question"]}])
        return WorkflowOutput(response=completion.choices[0].message.content)

    async def judge(task, response):
        is_held_out = task["question"].startswith("Ann")
        return JudgeOutput(reward=REWARDS[step] if is_held_out else float(sum(map(ord, response)) % 5))

    def on_step_end(record):
        global step
        step = record.step
        kill_once(f"step {record.step}", record.folder)

    def on_evaluation(record):
        kill_once(f"evaluation {record.step}", record.folder)

    def on_checkpoint(record):
        kill_once(f"checkpoint {record.step}", record.folder)

    def kill_once(place, folder):
        mark = Path(f"{folder.name} {place}")
        if folder.name == "killed" and place in KILLS and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    """
)
STOPPED = "ended early, after step 5 of 8: eval/held_out/reward has not improved on 0.9 of step 2 in 3 evaluations"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopping")
    write_small_pocket(folder / "pocket")
    (folder / "agent.py").write_text(AGENT)
    for name, person in (("train", "Tom"), ("test", "Ann")):
        rows = [{"question": f"{person} has {n} apples. How many?"} for n in range(4)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "workflow": "agent.py:workflow",
        "judge": "agent.py:judge",
        "checkpoint_root_dir": "runs",
        "total_steps": 8,
        "save_interval_steps": 4,
        "keep_checkpoints": 1,
        "keep_best": {"metric": "eval/held_out/reward"},
        "early_stopping": {"metric": "eval/held_out/reward", "patience": 3},
        "callbacks": {name: f"agent.py:{name}" for name in ("on_step_end", "on_evaluation", "on_checkpoint")},
        "model": {"path": "pocket", "max_model_len": 128, "max_tokens": 4, "device": "cpu"},
        "train_dataset": {"path": "train.jsonl"},
        "eval_datasets": {"held_out": {"path": "test.jsonl"}},
        "algorithm": {"batch_size": 2, "group_size": 3},
        "engine": {"kv_cache_tokens": 8192},
        "rollout": {"chat_model": "openai"},
        "trainer": {"learning_rate": 1e-3},
        "evaluation": {"interval_steps": 1, "at_start": True},
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    zygote = Zygote(folder)
    assert zygote.run(["tune", "run.yaml", "--set", "name=whole"]) == 0, (folder / "zygote.log").read_text()
    yield folder, zygote
    zygote.close()


def list_checkpoints(run):
    return sorted(path.name for path in run.iterdir() if path.name.startswith("global_step_"))


def test_a_run_without_improvement_ends_and_keeps_its_best_checkpoint(workplace):
    folder, _ = workplace
    run = folder / "runs/tunesmith/whole"
    assert STOPPED in (folder / "zygote.log").read_text()
    assert [row["step"] for row in read_metrics(run) if row["kind"] == "train"] == [1, 2, 3, 4, 5]
    assert list_checkpoints(run) == ["global_step_2", "global_step_5"]
    best = {"metric": "eval/held_out/reward", "mode": "max", "value": 0.9, "step": 2}
    assert json.loads((run / "best.json").read_text()) == best
    assert (run / "best").readlink().name == "global_step_2"
    assert (run / "best/config.json").exists()
    assert json.loads((run / "stopped.json").read_text())["step"] == 5


def test_the_link_to_the_best_checkpoint_is_a_model_path(workplace):
    folder, zygote = workplace
    models = ["--model", "best=runs/tunesmith/whole/best", "--model", "second=runs/tunesmith/whole/global_step_2"]
    assert zygote.run(["eval", "run.yaml", *models, "--out", "compared"]) == 0, (folder / "zygote.log").read_text()
    compared = json.loads((folder / "compared/comparison.json").read_text())
    assert "best" in json.dumps(compared)


def test_a_killed_run_ends_at_the_same_step(workplace):
    folder, zygote = workplace
    num_kills = 0
    while (status := zygote.run(["tune", "run.yaml", "--resume", "--set", "name=killed"])) != 0:
        assert status == -signal.SIGKILL, (folder / "zygote.log").read_text()
        num_kills += 1
    assert num_kills == 6
    whole, killed = (folder / "runs/tunesmith" / name for name in ("whole", "killed"))
    assert read_metrics(killed) == read_metrics(whole)
    assert list_checkpoints(killed) == list_checkpoints(whole)
    for name in ("best.json", "stopped.json"):
        assert (killed / name).read_text() == (whole / name).read_text()


def test_a_resumed_run_says_that_it_has_ended_and_continues_with_more_patience(workplace):
    folder, zygote = workplace
    run = folder / "runs/tunesmith/continued"
    shutil.copytree(run.with_name("whole"), run, symlinks=True)
    arguments = ["tune", "run.yaml", "--resume", "--set", "name=continued"]
    before = read_metrics(run)
    assert zygote.run(arguments) == 0
    log = (folder / "zygote.log").read_text()
    assert f"{STOPPED} (early_stopping.patience=3); to continue it, change early_stopping" in log
    assert read_metrics(run) == before
    assert zygote.run([*arguments, "--set", "early_stopping.patience=4"]) == 0
    assert json.loads((run / "stopped.json").read_text())["step"] == 6
    assert list_checkpoints(run) == ["global_step_2", "global_step_6"]
    assert zygote.run([*arguments, "--set", "early_stopping=null", "--set", "keep_best=null"]) == 0
    assert [row["step"] for row in read_metrics(run) if row["kind"] == "train"] == list(range(1, 9))
    assert not (run / "stopped.json").exists() and not (run / "best").is_symlink()


def test_a_misspelt_metric_of_an_evaluation_is_an_error_after_the_step_is_saved(workplace):
    folder, zygote = workplace
    arguments = ["tune", "run.yaml", "--resume", "--set", "name=misspelt", "--set", "evaluation.at_start=false"]
    wrong = ["--set", "keep_best.metric=eval/held_out/rewrad"]
    assert zygote.run([*arguments, *wrong]) == 1
    log = (folder / "zygote.log").read_text()
    assert "keep_best.metric='eval/held_out/rewrad' is not reported; available: eval/held_out/num_tasks" in log
    assert list_checkpoints(folder / "runs/tunesmith/misspelt") == ["global_step_1"]
    assert zygote.run([*arguments, "--set", "total_steps=2"]) == 0


def test_a_misspelt_metric_of_a_step_is_an_error_after_the_first_step(workplace):
    folder, zygote = workplace
    wrong = ["--set", "early_stopping.metric=rollout/reward", "--set", "evaluation.at_start=false"]
    assert zygote.run(["tune", "run.yaml", "--set", "name=step", *wrong]) == 1
    log = (folder / "zygote.log").read_text()
    assert "early_stopping.metric='rollout/reward' is not reported; available: rollout/" in log


def build(**settings):
    sets = {"held_out": {"path": "test.jsonl"}}
    return build_section(RunConfig, {"model": {"path": "pocket"}, "eval_datasets": sets} | settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"early_stopping": {"metric": "eval/heldout/reward"}},
            "names no set .*: did you mean 'held_out'",
        ),
        ({"keep_best": {"metric": "eval/x/reward"}, "eval_datasets": {}}, "names no set of eval_datasets: known: none"),
        ({"keep_best": {"metric": "rollout/reward_mean"}}, "must be a metric of an evaluation"),
        ({"early_stopping": {"metric": "reward"}}, "must be a metric of an evaluation"),
        (
            {"early_stopping": {"metric": "eval/held_out/reward"}, "evaluation": {"interval_steps": 0}},
            "no effect with evaluation.interval_steps=0",
        ),
        ({"early_stopping": {"metric": "train/loss", "patience": None}}, "patience=null needs a target"),
    ],
)
def test_metrics_that_cannot_exist_are_refused_with_the_file(settings, message):
    with pytest.raises(ConfigError, match=message):
        build(**settings)
