"""Runs resumed from an earlier checkpoint, end to end: the same metrics, and no file is deleted."""

from __future__ import annotations

import shutil

import pytest

from run_folders import load_untimed_metrics
from small_runs import build_small_run, list_apples, write_splits
from tunesmith import TunerModelConfig
from tunesmith.commands.sft.train import resume_training
from tunesmith.config import SftConfig
from tunesmith.errors import StorageError, TunesmithError
from tunesmith.experience.store import load_rollouts
from tunesmith.monitor.metrics_file import load_metrics
from tunesmith.runs.workspace import Workspace
from tunesmith.storage import new_folder

NUM_STEPS = 4


@pytest.fixture
def run(tmp_path, pocket_folder):
    """Calls tune() with a checkpoint every step, a replay buffer, and rollouts merged by two steps."""
    return build_small_run(
        tmp_path, pocket_folder, write_splits(tmp_path / "data", list_apples(6)), "save_interval_steps=1",
        "experience.replay.num_groups=1", "steps_per_file=2", "trainer.mismatch_stop=100", steps=NUM_STEPS,
    )  # fmt: skip


def test_resuming_before_a_damaged_checkpoint_reproduces_the_metrics(run, capsys):
    whole = run()
    before = load_untimed_metrics(whole.folder / "metrics.jsonl")
    assert {path.name for path in (whole.folder / "rollouts").iterdir()} == {
        "steps_000001-000002.parquet", "steps_000003-000004.parquet"
    }  # fmt: skip
    weights = whole.checkpoint / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 64
    weights.write_bytes(content)
    with pytest.raises(StorageError, match=r"global_step_4/model\.safetensors is damaged.*--resume-from 3"):
        run(continue_from_checkpoint=True)
    again = run("resume_from_step=3", continue_from_checkpoint=True)
    assert load_untimed_metrics(again.folder / "metrics.jsonl") == before
    (old,) = again.folder.glob("old-*")
    assert f"resumed from step 3; files of later steps were moved to {old}" in capsys.readouterr().err
    assert (old / "global_step_4").is_dir()
    for step in range(1, NUM_STEPS + 1):
        name = f"rollouts/step_{step:06d}.parquet"
        one = load_rollouts(again.folder / name)
        assert one
        if step > 2:
            other = load_rollouts(old / name)
            assert [[t.turns for t in g.trajectories] for g in one] == [
                [t.turns for t in g.trajectories] for g in other
            ]


def test_a_run_without_its_checkpoints_restarts_only_with_step_0(run):
    whole = run()
    for checkpoint in whole.folder.glob("global_step_*"):
        shutil.rmtree(checkpoint)
    with pytest.raises(StorageError, match=r"global_step_4 is missing or not complete; .*--resume-from 0"):
        run(continue_from_checkpoint=True)
    assert len(load_metrics(whole.folder / "metrics.jsonl")) == NUM_STEPS
    restarted = run("resume_from_step=0", continue_from_checkpoint=True)
    (old,) = restarted.folder.glob("old-*")
    for root in (restarted.folder, old):
        assert len(load_metrics(root / "metrics.jsonl")) == NUM_STEPS
        assert list((root / "monitor/tensorboard").iterdir())


def test_a_failed_model_load_removes_the_run_folder(run, tmp_path, pocket_folder):
    broken = tmp_path / "broken"
    shutil.copytree(pocket_folder, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises((TunesmithError, OSError, ValueError)):
        run(model=TunerModelConfig(model_path=str(broken), max_model_len=128, max_tokens=4))
    assert not (tmp_path / "runs/AgentScope/x").exists()
    assert run().num_steps == NUM_STEPS


def test_sft_names_the_checkpoint_before_a_damaged_one(tmp_path):
    config = SftConfig.model_validate(
        {"model": {"path": "m"}, "train_dataset": {"path": "d"}, "trainer": {"learning_rate": 1e-5}}
    )
    with Workspace(tmp_path / "sft") as workspace:
        assert resume_training(workspace, config, {}) is None
        for step in (2, 4):
            with new_folder(tmp_path / f"sft/global_step_{step}", {"step": step}) as temporary:
                (temporary / "weights").write_text(f"weights of {step}")
    (tmp_path / "sft/global_step_4/weights").write_text("weights of 5")
    with workspace:
        with pytest.raises(
            StorageError, match=r"is damaged.*move global_step_4 out of .* to resume from global_step_2"
        ):
            resume_training(workspace, config, {})
        (tmp_path / "sft/global_step_4").rename(tmp_path / "aside")
        assert resume_training(workspace, config, {}) == tmp_path / "sft/global_step_2"
