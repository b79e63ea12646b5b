from __future__ import annotations

import os
import re
import signal
import time
from datetime import datetime

import pytest

from tunesmith.config import RunConfig
from tunesmith.errors import ConfigError, StorageError
from tunesmith.pipeline.load_config import load_config
from tunesmith.pipeline.run_folder import open_run_folder, resolve_run_root
from tunesmith.storage import RunPaths, save_json, save_text


def build_config(tmp_path, **changes) -> RunConfig:
    values = {"model": {"path": "m"}, "name": "first", "project": "p", "checkpoint_root_dir": str(tmp_path)}
    return RunConfig.model_validate(values | changes)


def commit(paths: RunPaths, step: int) -> None:
    save_json(paths.checkpoint(step) / "DONE.json", {"step": step, "files": {}})


def test_a_new_run_saves_its_config(tmp_path):
    config = build_config(tmp_path)
    with open_run_folder(config) as run:
        assert run.paths.root == tmp_path / "p" / "first"
        assert (run.checkpoint, run.committed_step, run.changed_keys) == (None, None, ())
        assert load_config(run.paths.config) == config


def test_a_run_without_a_name_is_named_by_the_time(tmp_path):
    config = build_config(tmp_path, name=None)
    root = resolve_run_root(config, now=datetime(2025, 3, 4, 5, 6, 7))
    assert root == tmp_path / "p" / "Experiment-20250304050607"
    assert re.fullmatch(r"Experiment-\d{14}", resolve_run_root(config).name)


@pytest.mark.parametrize("name", ["", "..", "a/b"])
def test_a_name_is_one_folder(tmp_path, name):
    with pytest.raises(ConfigError, match="name must be the name of one folder"):
        resolve_run_root(build_config(tmp_path, name=name))


def test_resuming_needs_a_name(tmp_path):
    with pytest.raises(ConfigError, match="needs the name"):
        resolve_run_root(build_config(tmp_path, name=None, continue_from_checkpoint=True))


def test_a_folder_with_a_run_is_refused_and_left_alone(tmp_path):
    open_run_folder(build_config(tmp_path)).close()
    before = (tmp_path / "p" / "first" / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"already holds a run: choose another name.*--resume"):
        open_run_folder(build_config(tmp_path, seed=7))
    assert (tmp_path / "p" / "first" / "config.yaml").read_text() == before


def test_resuming_goes_on_from_the_last_commit_and_forgets_what_came_after(tmp_path):
    with open_run_folder(build_config(tmp_path)) as run:
        paths = run.paths
    for step in (2, 4):
        commit(paths, step)
    for step in (4, 5):
        save_text(paths.rollouts(step), "x")
        save_text(paths.evaluation(step), "x")
        save_text(paths.selection(step), "x")
    save_text(paths.root / "rollouts" / "step_000003.parquet.tmp-99", "x")
    save_text(paths.root / "global_step_6.tmp-99" / "model.safetensors", "x")
    save_text(paths.root / "global_step_8" / "model.safetensors", "no DONE.json")
    with open_run_folder(build_config(tmp_path, continue_from_checkpoint=True)) as run:
        assert run.checkpoint == paths.checkpoint(4)
        assert run.committed_step == 4
    assert sorted(p.name for p in (paths.root / "rollouts").iterdir()) == ["step_000004.parquet"]
    assert sorted(p.name for p in (paths.root / "eval").iterdir()) == ["step_000004.json"]
    assert sorted(p.name for p in (paths.root / "selection").iterdir()) == ["step_000004.json"]
    assert not (paths.root / "global_step_6.tmp-99").exists()


def test_resuming_without_a_commit_starts_anew(tmp_path):
    with open_run_folder(build_config(tmp_path)) as run:
        save_text(run.paths.rollouts(1), "x")
    with open_run_folder(build_config(tmp_path, continue_from_checkpoint=True, seed=1)) as run:
        assert run.committed_step is None
        assert list((run.paths.root / "rollouts").iterdir()) == []


def test_a_resumed_run_may_end_later_but_not_be_another(tmp_path):
    with open_run_folder(build_config(tmp_path, total_steps=4)) as run:
        commit(run.paths, 4)
    free = {"continue_from_checkpoint": True, "total_steps": 8, "monitor": {"trackers": []}, "save_interval_steps": 2}
    with open_run_folder(build_config(tmp_path, **free)) as run:
        assert set(run.changed_keys) == {
            "continue_from_checkpoint", "total_steps", "monitor.trackers", "save_interval_steps"
        }  # fmt: skip
        assert load_config(run.paths.config).total_steps == 8
    other = free | {"algorithm": {"group_size": 16, "loss_args": {"clip_high": 0.3}}, "seed": 1}
    with pytest.raises(ConfigError) as caught:
        open_run_folder(build_config(tmp_path, **other))
    assert "algorithm.group_size was 8, is 16" in str(caught.value)
    assert "algorithm.loss_args" in str(caught.value)
    assert "seed was 42, is 1" in str(caught.value)
    assert "total_steps" not in str(caught.value)


def test_only_one_process_writes_a_run(tmp_path):
    config = build_config(tmp_path)
    resumed = build_config(tmp_path, continue_from_checkpoint=True)
    with open_run_folder(config), pytest.raises(StorageError, match=f"is being written by process {os.getpid()}"):
        open_run_folder(resumed)
    open_run_folder(resumed).close()


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path):
    ready = tmp_path / "ready"
    child = os.fork()
    if child == 0:
        held = open_run_folder(build_config(tmp_path))
        ready.write_text(str(held.paths.root))
        time.sleep(60)
        os._exit(0)
    while not ready.exists():
        time.sleep(0.01)
    resumed = build_config(tmp_path, continue_from_checkpoint=True)
    with pytest.raises(StorageError, match=f"by process {child}"):
        open_run_folder(resumed)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    open_run_folder(resumed).close()


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"^cannot write .*file/p/first: Not a directory$"):
        open_run_folder(build_config(tmp_path, checkpoint_root_dir=str(tmp_path / "file")))
