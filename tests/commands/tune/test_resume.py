"""A killed run resumes to the same metrics and weights, bit for bit on a CPU."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from conditions import wait_until
from killed_runs import Zygote, count_metrics, read_metrics
from run_folders import held_after, write_run_folder
from tunesmith.experience.store import load_rollouts
from tunesmith.runs.record import RunRecord

NUM_STEPS = 6


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    write_run_folder(
        folder,
        total_steps=NUM_STEPS,
        steps_per_file=2,
        algorithm={"batch_size": 3, "group_size": 4},
        trainer={"learning_rate": 1e-3, "schedule": "cosine", "warmup_steps": 2},
    )
    zygote = Zygote(folder)
    yield folder, zygote
    zygote.close()


KILLS: dict[str, Callable[[Path], bool]] = {
    "while the model loads": lambda run: (run / "config.yaml").exists(),
    "between rollouts and update": lambda run: (run / "rollouts/step_000001.parquet").exists(),
    "after a step that is not saved": lambda run: count_metrics(run) >= 2,
    "while the first checkpoint is written": lambda run: bool(list(run.glob("global_step_2*"))),
    "after a step of the resumed run": lambda run: count_metrics(run) >= 4,
    "while the last checkpoint is written": lambda run: bool(list(run.glob("global_step_6*"))),
}
"""Points of a run, in their order, at which it is killed once."""


def test_killed_runs_end_like_an_uninterrupted_one(workplace):
    folder, zygote = workplace
    assert zygote.run(["tune", "run.yaml", "--set", "name=whole"]) == 0, (folder / "zygote.log").read_text()
    run = folder / "runs/tunesmith/killed"
    arguments = ["tune", "run.yaml", "--resume", "--set", "name=killed"]
    for is_reached in KILLS.values():
        zygote.kill(arguments, when=functools.partial(is_reached, run))
    assert zygote.run(arguments) == 0, (folder / "zygote.log").read_text()
    assert_same_run(folder / "runs/tunesmith/whole", run)


def test_a_killed_run_with_rollouts_in_flight_ends_and_trains_nothing_too_old(workplace):
    """Rollouts in flight are lost with the process and run again, so the resumed run is another one."""
    folder, zygote = workplace
    arguments = ["tune", "run.yaml", "--resume", "--set", "name=stale", "--set", "experience.replay.max_staleness=2"]
    arguments += ["--set", "rollout.max_staleness=2", "--set", "save_interval_steps=1"]
    run = folder / "runs/tunesmith/stale"
    for num_lines in (1, 3, 5):
        zygote.kill(arguments, when=lambda num_lines=num_lines: count_metrics(run) >= num_lines)
    assert zygote.run(arguments) == 0, (folder / "zygote.log").read_text()
    steps = [row for row in read_metrics(run) if row["kind"] == "train"]
    assert [row["step"] for row in steps] == list(range(1, NUM_STEPS + 1))
    assert max(row.get("staleness/max", 0) for row in steps) <= 2
    for step in range(1, NUM_STEPS + 1):
        groups = load_rollouts(run / f"rollouts/step_{step:06d}.parquet")
        turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
        lags = {step - 1 - version for turn in turns for version in turn.policy_versions}
        assert lags <= {0, 1, 2}


def test_a_run_that_was_killed_before_it_removed_old_checkpoints_removes_them(workplace):
    """Checkpoints of a run that keeps all are those of one that keeps one and was killed after it wrote another."""
    folder, zygote = workplace
    assert zygote.run(["tune", "run.yaml", "--resume", "--set", "name=whole"]) == 0
    run = folder / "runs/tunesmith/last"
    shutil.copytree(folder / "runs/tunesmith/whole", run)
    arguments = ["tune", "run.yaml", "--resume", "--set", "name=last", "--set", "keep_checkpoints=1"]
    assert {path.name for path in run.glob("global_step_*")} > {"global_step_6"}
    assert zygote.run(arguments) == 0, (folder / "zygote.log").read_text()
    assert [path.name for path in run.glob("global_step_*")] == ["global_step_6"]
    assert_same_run(folder / "runs/tunesmith/whole", run)


def test_a_run_that_was_killed_right_after_its_last_checkpoint_is_tidied_up(workplace):
    """The files of a run that merges none are those of one that was killed before it did."""
    folder, zygote = workplace
    run, arguments = folder / "runs/tunesmith/unmerged", ["tune", "run.yaml", "--resume", "--set", "name=unmerged"]
    assert zygote.run([*arguments, "--set", "steps_per_file=100"]) == 0, (folder / "zygote.log").read_text()
    (run / "last_commit.json").write_text('{"step": 4}')
    assert zygote.run(arguments) == 0, (folder / "zygote.log").read_text()
    names = {path.name for path in (run / "rollouts").iterdir()}
    assert names == {f"steps_{step - 1:06d}-{step:06d}.parquet" for step in (2, 4, 6)}
    assert json.loads((run / "last_commit.json").read_text()) == {"step": 6}


def assert_same_run(whole: Path, killed: Path) -> None:
    assert read_metrics(killed) == read_metrics(whole)
    last = f"global_step_{NUM_STEPS}"
    expected, found = (load_file(run / last / "model.safetensors") for run in (whole, killed))
    assert expected.keys() == found.keys()
    assert all((expected[name] == found[name]).all() for name in expected)
    for step in range(1, NUM_STEPS + 1):
        name = f"rollouts/step_{step:06d}.parquet"
        one, other = load_rollouts(whole / name), load_rollouts(killed / name)
        assert [[t.turns for t in g.trajectories] for g in one] == [[t.turns for t in g.trajectories] for g in other]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_saves_the_step_and_the_resumed_run_ends_like_an_uninterrupted_one(workplace, number):
    """`save_interval_steps` and `save_interval_s` are never due, so only the signal saves."""
    folder, zygote = workplace
    assert zygote.run(["tune", "run.yaml", "--resume", "--set", "name=whole"]) == 0
    run = folder / f"runs/tunesmith/{number.name}"
    arguments = ["tune", "run.yaml", "--resume", "--set", f"name={number.name}", "--set", "save_interval_steps=100"]
    with held_after(run / "metrics.jsonl", 2):
        pid = zygote.start(arguments)
        wait_until((folder / "held").exists)
        os.kill(pid, number)
        wait_until(lambda: f"{number.name}: finishing and saving this step" in (folder / "zygote.log").read_text())
    status = zygote.wait()
    assert status in (128 + number, -number), (folder / "zygote.log").read_text()
    printed = (folder / "zygote.log").read_text()
    assert "the last checkpoint is" in printed and "repeat the command" in printed
    assert RunRecord(run).state == "interrupted"
    last_step = read_metrics(run)[-1]["step"]
    assert last_step < NUM_STEPS and [path.name for path in run.glob("global_step_*")] == [f"global_step_{last_step}"]
    assert zygote.run(arguments) == 0
    assert_same_run(folder / "runs/tunesmith/whole", run)


def test_a_second_signal_ends_the_run_within_its_step(workplace):
    folder, zygote = workplace
    run = folder / "runs/tunesmith/twice"
    log = folder / "zygote.log"
    num_before = len(log.read_text()) if log.exists() else 0
    with held_after(run / "metrics.jsonl", 1):
        pid = zygote.start(["tune", "run.yaml", "--set", "name=twice", "--set", "save_interval_steps=100"])
        wait_until((folder / "held").exists)
        for words in ("finishing and saving this step", "ending the run"):
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda words=words: words in log.read_text()[num_before:])
        assert zygote.wait() == 128 + signal.SIGTERM
    assert count_metrics(run) <= 2 and not list(run.glob("global_step_*"))


def test_checkpoints_by_time_replace_each_other_and_change_nothing(workplace):
    folder, zygote = workplace
    arguments = ["tune", "run.yaml", "--set", "save_interval_s=1e-9", "--set", "save_interval_steps=4", "--set"]
    timed, killed = folder / "runs/tunesmith/timed", folder / "runs/tunesmith/killed-between"
    assert zygote.run(["tune", "run.yaml", "--resume", "--set", "name=whole"]) == 0
    assert zygote.run([*arguments, "name=timed"]) == 0
    for step in (1, 3, 5):  # also between the rename of a checkpoint and the removal of the one before
        done = killed / f"global_step_{step}/DONE.json"
        zygote.kill([*arguments, "name=killed-between", "--resume"], when=done.exists)
    assert zygote.run([*arguments, "name=killed-between", "--resume"]) == 0
    for run in (timed, killed):
        assert {path.name for path in run.glob("global_step_*")} == {"global_step_4", "global_step_6"}
        assert_same_run(folder / "runs/tunesmith/whole", run)


def test_resuming_a_finished_run_does_nothing_and_a_used_name_is_refused(workplace):
    folder, zygote = workplace
    arguments = ["tune", "run.yaml", "--set", "name=again", "--set", "total_steps=2"]
    assert zygote.run(arguments) == 0
    before = read_metrics(folder / "runs/tunesmith/again")
    assert zygote.run(arguments) == 1
    assert "already holds a run" in (folder / "zygote.log").read_text()
    assert zygote.run([*arguments, "--resume"]) == 0
    assert read_metrics(folder / "runs/tunesmith/again") == before


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_run_is_not_resumed_on_changed_rows(workplace, split):
    folder, zygote = workplace
    arguments = ["tune", "run.yaml", "--resume", "--set", f"name=changed-{split}", "--set", "total_steps=2"]
    assert zygote.run(arguments) == 0
    before = read_metrics(folder / f"runs/tunesmith/changed-{split}")
    file = folder / f"data/{split}.jsonl"
    text, num_before = file.read_text(), len((folder / "zygote.log").read_text())
    try:
        file.write_text(
            text + text.splitlines()[0] + "\n" if split == "train" else text.replace("0 apples", "7 apples")
        )
        assert zygote.run([*arguments, "--set", "total_steps=4"]) == 1
    finally:
        file.write_text(text)
    printed = (folder / "zygote.log").read_text()[num_before:]
    name = "train_dataset" if split == "train" else "eval_datasets.held_out"
    assert f"was made with other settings: the content of {name} changed. Restore them" in " ".join(printed.split())
    assert read_metrics(folder / f"runs/tunesmith/changed-{split}") == before
