from __future__ import annotations

import builtins
import io
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tunesmith.config import MonitorSection
from tunesmith.monitor.console import ConsoleProgress, format_duration
from tunesmith.monitor.metrics_file import load_metrics
from tunesmith.monitor.monitor import Monitor
from tunesmith.monitor.tracker import EXTRAS
from tunesmith.storage import RunPaths


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def build_metrics(step: int) -> dict[str, float]:
    return {"rollout/reward_mean": step / 4, "perf/sampled_tokens_per_s": 812.4, "train/loss": -0.5 * step}


def run(root, steps, *, committed_step=None, stream=None, **settings) -> None:
    with Monitor(
        root, MonitorSection(**settings), total_steps=4, committed_step=committed_step, stream=stream or io.StringIO()
    ) as monitor:
        for step in steps:
            monitor.log(step, "train", build_metrics(step))


def load_scalars(root) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(RunPaths(root).tensorboard)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_every_sink_gets_the_same_metrics(tmp_path):
    run(tmp_path, [1, 2])
    scalars = load_scalars(tmp_path)
    for record in load_metrics(RunPaths(tmp_path).metrics):
        step = record.pop("step")
        assert record.pop("kind") == "train"
        assert set(record) == set(scalars)
        for name, value in record.items():
            assert dict(scalars[name])[step] == pytest.approx(value, rel=1e-6)


def test_a_resumed_run_shows_each_step_once(tmp_path):
    run(tmp_path, [1, 2, 3])
    run(tmp_path, [2], committed_step=1)
    assert [record["step"] for record in load_metrics(RunPaths(tmp_path).metrics)] == [1, 2]
    assert load_scalars(tmp_path)["train/loss"] == [(1, -0.5), (2, -1.0)]


@pytest.mark.parametrize("passed_s", [0, -90], ids=["within a second", "on a host whose clock is behind"])
def test_a_run_resumed_at_an_odd_time_shows_each_step_once(tmp_path, monkeypatch, passed_s):
    start_s = time.time()
    for attempt in range(3):
        monkeypatch.setattr(time, "time", lambda attempt=attempt: start_s + attempt * passed_s)
        run(tmp_path, [attempt + 1, attempt + 2], committed_step=attempt or None)
    assert load_scalars(tmp_path)["train/loss"] == [(1, -0.5), (2, -1.0), (3, -1.5), (4, -2.0)]


def test_a_new_run_shows_no_old_metrics(tmp_path):
    run(tmp_path, [1, 2, 3])
    run(tmp_path, [1])
    assert load_scalars(tmp_path)["train/loss"] == [(1, -0.5)]


def test_a_tracker_that_cannot_end_leaves_no_other_open(tmp_path, monkeypatch):
    ended = []

    class Broken:
        def __init__(self, run, name) -> None:
            self.name = name

        def close(self, *, is_failed) -> None:
            ended.append((self.name, is_failed))
            raise ConnectionError("the server is gone")

    path = "tunesmith.monitor.tensorboard:TensorBoardTracker"
    monkeypatch.setattr("tunesmith.monitor.tensorboard.TensorBoardTracker", Broken)
    monkeypatch.setattr("tunesmith.monitor.tracker.TRACKERS", {"tensorboard": path, "wandb": path})
    monkeypatch.setattr("tunesmith.monitor.tracker.EXTRAS", ())
    monitor = Monitor(tmp_path, MonitorSection(trackers=("tensorboard", "wandb")), total_steps=1, stream=io.StringIO())
    with pytest.raises(ConnectionError):
        monitor.close(is_failed=True)
    assert ended == [("tensorboard", True), ("wandb", True)]


def test_without_trackers_only_metrics_jsonl_is_written(tmp_path):
    run(tmp_path, [1], trackers=())
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_every_tracker_but_the_default_has_an_extra():
    names = get_args(get_args(MonitorSection.model_fields["trackers"].annotation)[0])
    assert set(names) == {"tensorboard", *EXTRAS}
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) <= declared["optional-dependencies"].keys()


def test_without_a_terminal_each_step_is_a_plain_line(tmp_path):
    stream = io.StringIO()
    run(tmp_path, [1, 2], stream=stream)
    first, second = stream.getvalue().splitlines()
    assert first.startswith("step 1/4  reward 0.250  812 tok/s  eta ")
    assert second.startswith("step 2/4  reward 0.500")
    assert "\x1b" not in stream.getvalue()


LONG_STEP = {
    "rollout/reward_mean": -0.25,
    "rollout/num_failed": 0.0,
    "rollout/num_truncated": 128.0,
    "rollout/num_trajectories": 512.0,
    "experience/num_useful_groups": 17.0,
    "experience/num_tasks_tried": 64.0,
    "perf/sampled_tokens_per_s": 24257.3,
    "perf/step_s": 123.4,
    "train/loss": 0.0123,
    "train/grad_norm": 0.5,
    "mismatch/kl": 1e-4,
}


def print_step(tmp_path, metrics, *, step, total_steps, **settings):
    stream = io.StringIO()
    with Monitor(tmp_path, MonitorSection(**settings), total_steps=total_steps, stream=stream) as monitor:
        monitor.log(step, "train", metrics)
    return stream.getvalue().rstrip("\n")


@pytest.mark.parametrize("total_steps", [20, 1000])
def test_the_line_of_a_step_fits_80_columns(tmp_path, monkeypatch, total_steps):
    """The first step takes a minute, and so will each of the others."""
    now = iter([0.0, 60.0])
    monkeypatch.setattr("tunesmith.monitor.console.time", SimpleNamespace(monotonic=lambda: next(now)))
    line = print_step(tmp_path, LONG_STEP, step=1, total_steps=total_steps)
    assert " ".join(line.split()).removeprefix("step 1/").partition(" eta ")[0] == (
        f"{total_steps} reward -0.250 useful 17/64 trunc 25% 24257 tok/s 123 s"
    )
    assert len(line) <= 80


def test_failures_and_chosen_metrics_are_added_to_the_line(tmp_path):
    line = print_step(
        tmp_path, LONG_STEP | {"rollout/num_failed": 3.0}, step=1, total_steps=2, console_metrics=("train/loss",)
    )
    assert "failed 3" in line and line.endswith("train/loss 0.0123") and "mismatch" not in line


def test_the_line_of_fine_tuning_has_its_loss(tmp_path):
    metrics = {"train/loss": 1.5, "train/grad_norm": 0.25, "perf/trained_tokens_per_s": 99.6, "perf/train_s": 0.31}
    line = print_step(tmp_path, metrics, step=2, total_steps=2)
    assert line == "step 2/2  loss +1.5000  grad 0.250  100 tok/s  0.3 s  eta 0s"


def test_lines_are_printed_at_the_interval_and_at_the_end(tmp_path):
    stream = io.StringIO()
    run(tmp_path, [1, 2, 3, 4], stream=stream, log_interval_steps=3)
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["3/4", "4/4"]


def test_a_terminal_shows_progress_below_the_lines(tmp_path):
    stream = Terminal()
    with Monitor(tmp_path, MonitorSection(), total_steps=4, committed_step=2, stream=stream) as monitor:
        monitor.show_status("rollouts 3/8")
        monitor.show_line("[a line] of ours")
        monitor.log(3, "train", build_metrics(3))
    shown = stream.getvalue()
    assert "rollouts 3/8" in shown
    assert "[a line] of ours" in shown
    assert "3/4" in shown
    assert "step 3/4" in shown


def test_progress_can_be_turned_off(tmp_path):
    stream = Terminal()
    with Monitor(tmp_path, MonitorSection(has_progress=False), total_steps=4, stream=stream) as monitor:
        monitor.show_status("rollouts 3/8")
        monitor.log(4, "eval", {"eval/test/reward": 0.5, "eval/test/num_tasks": 20.0})
    assert stream.getvalue() == "eval at step 4  test 0.500 on 20 tasks\n"


def test_an_evaluation_fits_a_line_of_80_columns(tmp_path):
    stream = Terminal()
    numbers = {"num_tasks": 200.0, "num_failures": 3.0, "reward": 0.25, "reward_low": 0.125, "reward_high": 0.5}
    metrics = {f"eval/test/{key}": value for key, value in numbers.items()} | {"perf/evaluation_s": 12.34}
    with Monitor(tmp_path, MonitorSection(has_progress=False), total_steps=4, stream=stream) as monitor:
        monitor.log(400, "eval", metrics | {"eval/loss": 0.5})
    line = "eval at step 400  test 0.250 (0.125 to 0.500) on 200 tasks, 3 failed  loss 0.5  12.3 s"
    assert stream.getvalue() == f"{line}\n"
    assert len(line.replace("  loss 0.5", "")) < 80


def test_durations_are_readable():
    assert [format_duration(s) for s in (0.4, 59.4, 59.6, 185, 7620)] == [
        "0 s", "59 s", "1 min 00 s", "3 min 05 s", "2 h 07 min"
    ]  # fmt: skip


def test_the_remaining_time_is_the_mean_of_recent_steps_times_steps_left(monkeypatch):
    now = iter([0.0, 10.0, 30.0])
    monkeypatch.setattr("tunesmith.monitor.console.time", SimpleNamespace(monotonic=lambda: next(now)))
    stream = io.StringIO()
    console = ConsoleProgress(first_step=2, total_steps=12, has_progress=False, log_interval_steps=1, stream=stream)
    console.show_train(3, {})
    console.show_train(4, {})
    assert stream.getvalue().splitlines() == ["step  3/12  eta 1m30s", "step  4/12  eta 2m00s"]


def test_the_monitor_and_the_store_run_without_torch():
    code = (
        "import sys, tunesmith.monitor.monitor, tunesmith.experience.store; "
        "sys.exit(sorted({'torch', 'transformers', 'tensorflow'} & sys.modules.keys()) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_notebook_gets_plain_text_on_stdout(monkeypatch, tmp_path, capsys):
    class ZMQInteractiveShell:
        """The shell of a Jupyter kernel, by whose name rich recognizes notebooks."""

    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter's kernel sets it
    with Monitor(tmp_path, MonitorSection(trackers=()), total_steps=1) as monitor:
        monitor.log(1, "train", build_metrics(1))
    shown = capsys.readouterr()
    assert shown.out.startswith("step 1/1") and "\x1b" not in shown.out
    assert shown.err == ""


def test_a_step_whose_rollouts_all_failed_has_the_line_of_reinforcement_learning():
    stream = io.StringIO()
    console = ConsoleProgress(total_steps=2, stream=stream)
    console.show_train(1, {"rollout/num_failed": 8.0, "rollout/num_trajectories": 8.0, "train/loss": 0.0})
    assert "failed 8" in stream.getvalue() and "loss" not in stream.getvalue()
