"""Callbacks of `tune()` and of run files: when they are called, what they receive, and what they may return."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest

from small_runs import build_small_run, list_apples, write_splits
from tunesmith import (
    AlgorithmConfig,
    CheckpointEnd,
    DatasetConfig,
    EvaluationEnd,
    StepEnd,
    Stop,
)
from tunesmith.errors import CallbackError, ConfigError
from tunesmith.experience.store import load_rollouts


def build_run(folder, pocket_folder):
    data = write_splits(folder / "data", list_apples(4))
    algorithm = AlgorithmConfig(
        group_size=3, batch_size=2, learning_rate=1e-3, save_interval_steps=3, eval_interval_steps=2
    )
    held_out = {"held_out": DatasetConfig(path=data, split="test")}
    return build_small_run(folder, pocket_folder, data, steps=4, eval_dataset=held_out, algorithm=algorithm)


@pytest.fixture
def run(tmp_path, pocket_folder):
    return build_run(tmp_path, pocket_folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, pocket_folder):
    """The metrics of an uninterrupted run without callbacks."""
    result = build_run(tmp_path_factory.mktemp("whole"), pocket_folder)()
    return drop_times(read_rows(result.folder))


def read_rows(folder):
    return list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))


def drop_times(rows):
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


def test_callbacks_receive_what_is_on_disk(run):
    seen = []

    def on_step_end(record):
        assert isinstance(record, StepEnd)
        saved = load_rollouts(record.folder / f"rollouts/step_{record.step:06d}.parquet")
        assert [[run.reward for run in group.trajectories] for group in saved] == [
            [run.reward for run in group.trajectories] for group in record.groups
        ]
        assert [len(row) for row in record.advantages] == [3, 3]
        assert read_rows(record.folder)[-1]["train/loss"] == record.metrics["train/loss"]
        with pytest.raises(TypeError):
            record.metrics["train/loss"] = 0.0
        with pytest.raises(dataclasses.FrozenInstanceError):
            record.step = 0
        seen.append(("step", record.step, record.total_steps))

    async def on_evaluation(record):
        await asyncio.sleep(0)
        assert isinstance(record, EvaluationEnd)
        assert record.metrics["eval/held_out/reward"] == record.results["held_out"].mean
        assert read_rows(record.folder)[-1]["kind"] == "eval"
        seen.append(("eval", record.step, record.total_steps))

    def on_checkpoint(record):
        assert isinstance(record, CheckpointEnd)
        assert (record.path / "DONE.json").exists()
        seen.append(("checkpoint", record.step, record.is_last))

    result = run(
        "evaluation.at_start=true", on_step_end=on_step_end, on_evaluation=on_evaluation, on_checkpoint=on_checkpoint
    )
    assert seen == [
        ("eval", 0, 4), ("step", 1, 4), ("step", 2, 4), ("eval", 2, 4), ("step", 3, 4), ("checkpoint", 3, False),
        ("step", 4, 4), ("eval", 4, 4), ("checkpoint", 4, True),
    ]  # fmt: skip
    assert result.stop_reason is None and not (result.folder / "stopped.json").exists()


def test_a_callback_stops_the_run_after_an_evaluation_and_a_checkpoint(run, capsys):
    seen = []
    result = run(
        on_step_end=lambda record: Stop("budget spent") if record.step == 1 else None,
        on_checkpoint=lambda record: seen.append((record.step, record.is_last)),
    )
    assert seen == [(1, True)]
    assert (result.num_steps, result.stop_reason, result.checkpoint.name) == (1, "budget spent", "global_step_1")
    assert [(row["step"], row["kind"]) for row in read_rows(result.folder)] == [(1, "train"), (1, "eval")]
    assert json.loads((result.folder / "stopped.json").read_text()) == {"step": 1, "reason": "budget spent"}
    assert "ended early, after step 1 of 4: budget spent" in capsys.readouterr().err
    resumed = run(continue_from_checkpoint=True)
    assert (resumed.num_steps, resumed.stop_reason) == (4, None)
    assert not (result.folder / "stopped.json").exists()


def test_an_evaluation_can_end_the_run(run):
    result = run(on_evaluation=lambda record: Stop("good enough"))
    assert (result.num_steps, result.stop_reason, result.checkpoint.name) == (2, "good enough", "global_step_2")


def test_a_run_stopped_before_its_first_step_has_no_checkpoint(run):
    result = run("evaluation.at_start=true", on_evaluation=lambda record: Stop("no need"))
    assert (result.num_steps, result.stop_reason, result.checkpoint) == (0, "no need", None)


def fail(record):
    raise KeyError("token")


async def fail_late(record):
    await asyncio.sleep(0)
    raise KeyError("token")


@pytest.mark.parametrize(
    ("name", "step", "function"),
    [("on_step_end", 1, fail), ("on_evaluation", 2, fail_late), ("on_checkpoint", 3, fail)],
)
def test_an_error_in_a_callback_ends_the_run_after_the_step_is_saved(run, whole, tmp_path, function, name, step):
    expected = rf"callback {name} \(test_callbacks:{function.__name__}\) at step {step} raised KeyError: 'token' "
    with pytest.raises(CallbackError, match=rf"{expected}\(.*test_callbacks.py:\d+ in {function.__name__}\)"):
        run(**{name: function})
    folder = tmp_path / "runs/AgentScope/x"
    assert (folder / f"global_step_{step}/DONE.json").exists()
    assert [row["step"] for row in read_rows(folder) if row["kind"] == "train"] == list(range(1, step + 1))
    resumed = run(continue_from_checkpoint=True, **{name: lambda record: None})
    assert drop_times(read_rows(resumed.folder)) == whole


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("on_step_end", True, r"returned True: it must return None or Stop\(reason\)"),
        ("on_checkpoint", Stop("x"), r"returned Stop\(reason='x'\): it must return None"),
    ],
)
def test_other_results_are_refused(run, name, value, message):
    with pytest.raises(CallbackError, match=message):
        run("total_steps=1", **{name: lambda record: value})


def test_a_callback_of_a_wrong_signature_is_refused_before_the_run_has_a_folder(run, tmp_path):
    with pytest.raises(ConfigError, match=r"callbacks.on_step_end='.*' must take one argument, the record: .*metrics"):
        run(on_step_end=lambda step, metrics: None)
    assert not (tmp_path / "runs").exists()


def test_a_run_file_names_callbacks_by_their_path(run, tmp_path):
    (tmp_path / "hooks.py").write_text(
        "from tunesmith import Stop\n\nasync def stop(record):\n    return Stop(f'after {record.step}')\n"
    )
    result = run(f"callbacks.on_step_end={tmp_path}/hooks.py:stop")
    assert (result.num_steps, result.stop_reason) == (1, "after 1")
    with pytest.raises(ConfigError, match="hooks.py has no function 'nothing'"):
        run(f"callbacks.on_checkpoint={tmp_path}/hooks.py:nothing", experiment_name="y")
