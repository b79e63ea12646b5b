from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import get_args

import pytest

from tunesmith.config import RunConfig
from tunesmith.errors import ConfigError, StorageError
from tunesmith.experience.store import save_rollouts
from tunesmith.model.checkpoint import RUN_STATE
from tunesmith.runs.load_config import load_section
from tunesmith.runs.run_folder import MUTABLE_KEYS, RunFolder, open_run_folder, resolve_run_root, set_learning_rate
from tunesmith.storage import RunPaths, new_folder, save_json, save_text


def build_config(tmp_path, **changes) -> RunConfig:
    values = {"model": {"path": "m"}, "name": "first", "project": "p", "checkpoint_root_dir": str(tmp_path)}
    return RunConfig.model_validate(values | changes)


def commit(paths: RunPaths, step: int, *, replayed: tuple[int, ...] = ()) -> None:
    state = {"step": step, "replay": {"entries": [{"step": each} for each in replayed]}}
    with new_folder(paths.checkpoint(step), {"step": step}) as temporary:
        save_json(temporary / RUN_STATE, state)
        save_text(temporary / "model.safetensors", f"weights of step {step}")


def log_steps(paths: RunPaths, last: int) -> None:
    """Write the files of a run other than checkpoints."""
    for step in range(1, last + 1):
        save_rollouts(paths.rollouts(step), [])
        save_json(paths.selection(step), {"choices": [step]})
        save_json(paths.evaluation(step), {})
    lines = [{"step": step, "kind": "train"} for step in range(1, last + 1)]
    save_text(paths.metrics, "".join(json.dumps(line) + "\n" for line in lines))


def list_tree(folder) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def damage(path) -> None:
    """Change one bit."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_new_run_saves_its_config(tmp_path):
    config = build_config(tmp_path)
    with open_run_folder(config) as run:
        assert run.paths.root == tmp_path / "p" / "first"
        assert (run.checkpoint, run.committed_step) == (None, None)
        assert load_section(RunConfig, run.paths.config) == set_learning_rate(config)


def test_a_run_without_a_name_is_named_by_the_time(tmp_path):
    config = build_config(tmp_path, name=None)
    root = resolve_run_root(config, now=datetime(2025, 3, 4, 5, 6, 7))
    assert root == tmp_path / "p" / "Experiment-20250304050607"
    assert re.fullmatch(r"Experiment-\d{14}", resolve_run_root(config).name)


@pytest.mark.parametrize("name", ["", "..", "a/b"])
def test_a_name_is_one_folder(tmp_path, name):
    with pytest.raises(ConfigError, match="name must be a single folder name"):
        resolve_run_root(build_config(tmp_path, name=name))


def test_resuming_needs_a_name(tmp_path):
    with pytest.raises(ConfigError, match="needs the name"):
        resolve_run_root(build_config(tmp_path, name=None, continue_from_checkpoint=True))


def test_what_a_kill_in_the_first_write_left_does_not_use_the_name(tmp_path):
    root = resolve_run_root(build_config(tmp_path))
    root.mkdir(parents=True)
    (root / "config.yaml.tmp-1").write_text("")
    with open_run_folder(build_config(tmp_path)) as run:
        assert {path.name for path in run.root.iterdir()} == {"config.yaml", "run.lock"}


def test_a_folder_with_a_run_is_refused_and_left_alone(tmp_path):
    with open_run_folder(build_config(tmp_path)) as run:
        log_steps(run.paths, 1)
    before = (tmp_path / "p" / "first" / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"already holds a run: choose another name.*--resume"):
        open_run_folder(build_config(tmp_path, seed=7))
    assert (tmp_path / "p" / "first" / "config.yaml").read_text() == before


def test_a_run_resumes_from_its_last_commit_and_deletes_later_files(tmp_path):
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


def test_resuming_without_a_commit_starts_from_the_beginning(tmp_path):
    with open_run_folder(build_config(tmp_path)) as run:
        save_text(run.paths.rollouts(1), "x")
    with open_run_folder(build_config(tmp_path, continue_from_checkpoint=True, seed=1)) as run:
        assert run.committed_step is None
        assert list((run.paths.root / "rollouts").iterdir()) == []


def resume(tmp_path, **changes) -> RunFolder:
    return open_run_folder(build_config(tmp_path, continue_from_checkpoint=True, **changes))


@pytest.fixture
def committed(tmp_path) -> RunPaths:
    """A run of six steps, committed at two, four and six."""
    with open_run_folder(build_config(tmp_path, save_interval_steps=2)) as run:
        log_steps(run.paths, 6)
        for step in (2, 4, 6):
            commit(run.paths, step)
        save_json(run.paths.last_commit, {"step": 6})
    return run.paths


@pytest.mark.parametrize("has_record", [True, False], ids=["new folder", "old folder"])
def test_missing_checkpoints_are_an_error_that_removes_nothing(tmp_path, committed, has_record):
    for step in (2, 4, 6):
        shutil.rmtree(committed.checkpoint(step))
    if not has_record:
        committed.last_commit.unlink()
    before = list_tree(committed.root)
    with pytest.raises(StorageError, match=r"global_step_\d is missing.*restore it, or restart.*--resume-from 0"):
        resume(tmp_path, save_interval_steps=2)
    assert list_tree(committed.root) == before


def test_a_missing_newest_checkpoint_names_the_newest_there_is(tmp_path, committed):
    shutil.rmtree(committed.checkpoint(6))
    with pytest.raises(StorageError, match=r"global_step_6 is missing.*resume from step 4.*--resume-from 4"):
        resume(tmp_path, save_interval_steps=2)
    assert committed.rollouts(6).exists()


@pytest.mark.parametrize("name", ["model.safetensors", RUN_STATE])
def test_damage_of_equal_size_names_the_newest_complete_step(tmp_path, committed, name):
    damage(committed.checkpoint(6) / name)
    damage(committed.checkpoint(4) / name)
    before = list_tree(committed.root)
    with pytest.raises(StorageError, match=r"is damaged: its CRC-32 is .*resume from step 2.*resume_from_step=2"):
        resume(tmp_path, save_interval_steps=2)
    assert list_tree(committed.root) == before


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_damaged_replay_file_names_the_newest_step_that_does_not_need_it(tmp_path, is_gone):
    with open_run_folder(build_config(tmp_path)) as run:
        log_steps(run.paths, 4)
        commit(run.paths, 2, replayed=(1,))
        commit(run.paths, 4, replayed=(1, 3))
    if is_gone:
        run.paths.rollouts(3).unlink()
    else:
        run.paths.rollouts(3).write_bytes(b"PAR1 but no more")
    with pytest.raises(StorageError, match=r"cannot read .*step_000003\.parquet.*--resume-from 2"):
        resume(tmp_path)


def test_resuming_from_a_chosen_step_archives_later_steps(tmp_path, committed):
    damage(committed.checkpoint(6) / "model.safetensors")
    with resume(tmp_path, save_interval_steps=2, resume_from_step=2) as run:
        assert run.committed_step == 2
        assert load_section(RunConfig, run.paths.config).resume_from_step is None
    kept = {"global_step_2", "rollouts/step_000002.parquet", "selection/step_000002.json", "eval/step_000002.json"}
    moved = {"global_step_4", "global_step_6", "rollouts/step_000003.parquet", "eval/step_000006.json"}
    assert all((run.paths.root / name).exists() and not (run.archive / name).exists() for name in kept)
    assert all((run.archive / name).exists() and not (run.paths.root / name).exists() for name in moved)
    assert len((run.archive / "metrics.jsonl").read_text().splitlines()) == 6
    with resume(tmp_path, save_interval_steps=2) as run:  # the next resume uses that step
        assert (run.committed_step, run.archive) == (2, None)


def test_restarting_from_step_0_archives_everything(tmp_path, committed):
    save_text(committed.tensorboard / "events", "x")
    before = set(list_tree(committed.root)) - {"run.lock"}
    with resume(tmp_path, save_interval_steps=2, resume_from_step=0) as run:
        assert run.committed_step is None
        assert before <= set(list_tree(run.archive))
        assert {path.name for path in run.paths.root.iterdir() if path.is_file()} == {"config.yaml", "run.lock"}


def test_archiving_may_be_interrupted_anywhere(tmp_path, committed, monkeypatch):
    """Whichever move fails, after the next attempt every file is in its folder or in an archive."""
    names = {path for path in list_tree(committed.root) if path.startswith(("global_step", "rollouts", "eval"))}
    rename, calls = Path.rename, 0

    def fail_at_times(self, target):
        nonlocal calls
        calls += 1
        if calls % 4 == 0:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_at_times)
    for _ in range(8):
        try:
            resume(tmp_path, save_interval_steps=2, resume_from_step=2).close()
        except StorageError:
            continue
        break
    else:
        pytest.fail("no attempt succeeded")
    found = {re.sub(r"^old-[\d-]+/", "", path) for path in list_tree(committed.root)}
    assert names <= found
    assert not committed.checkpoint(4).exists()


def test_a_chosen_step_must_exist(tmp_path, committed):
    with pytest.raises(ConfigError, match=r"no checkpoint of that step; it has 2, 4, 6; 0 restarts from the beginning"):
        resume(tmp_path, save_interval_steps=2, resume_from_step=3)
    with pytest.raises(ValueError, match="resume_from_step=2 has no effect with continue_from_checkpoint=false"):
        build_config(tmp_path, resume_from_step=2)


def test_an_old_folder_is_resumed(tmp_path):
    """It has no checksums, no record of the last commit, and no step numbers in its rollouts."""
    with open_run_folder(build_config(tmp_path, save_interval_steps=2)) as run:
        log_steps(run.paths, 5)
    for step in (2, 4):
        commit(run.paths, step)
        record = json.loads((run.paths.checkpoint(step) / "DONE.json").read_text())
        del record["crc32"]
        save_json(run.paths.checkpoint(step) / "DONE.json", record)
    with resume(tmp_path, save_interval_steps=2) as run:
        assert run.committed_step == 4
        assert not run.paths.rollouts(5).exists()


def test_a_run_that_fails_before_its_first_step_removes_its_folder(tmp_path):
    with pytest.raises(ValueError, match="no model"), open_run_folder(build_config(tmp_path)) as run:
        save_text(run.paths.metrics, "")
        save_text(run.paths.tensorboard / "events", "x")
        save_text(run.paths.tokenizer / "tokenizer.json", "{}")
        raise ValueError("no model")
    assert not run.paths.root.exists()
    with open_run_folder(build_config(tmp_path)):
        pass


def test_the_name_of_a_run_killed_before_its_first_step_is_reusable(tmp_path):
    run = open_run_folder(build_config(tmp_path))
    save_json(run.paths.evaluation(0), {})
    save_text(run.paths.metrics, '{"step": 0, "kind": "eval"}\n')
    run.close()
    with open_run_folder(build_config(tmp_path, seed=1)) as run:
        assert (run.archive / "eval/step_000000.json").exists()
        assert load_section(RunConfig, run.paths.config).seed == 1


def test_a_run_that_fails_later_keeps_its_folder(tmp_path):
    with pytest.raises(ValueError, match="loss"), open_run_folder(build_config(tmp_path)) as run:
        log_steps(run.paths, 1)
        raise ValueError("loss")
    assert run.paths.rollouts(1).exists()
    with pytest.raises(ConfigError, match="already holds a run"):
        open_run_folder(build_config(tmp_path))


def test_runs_without_a_name_never_share_a_folder(tmp_path):
    config, now = build_config(tmp_path, name=None), datetime(2025, 3, 4, 5, 6, 7)
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: open_run_folder(config, now=now), range(8)))
    names = {run.paths.root.name for run in runs}
    stamp = "Experiment-20250304050607"
    assert names == {stamp, *(f"{stamp}-{number}" for number in range(2, 9))}
    for run in runs:
        run.close()


def test_a_resumed_run_may_change_its_length_but_not_its_training_settings(tmp_path):
    with open_run_folder(build_config(tmp_path, total_steps=4)) as run:
        commit(run.paths, 4)
    free = {"continue_from_checkpoint": True, "total_steps": 8, "monitor": {"trackers": []}, "save_interval_steps": 2}
    with open_run_folder(build_config(tmp_path, **free)) as run:
        assert load_section(RunConfig, run.paths.config).total_steps == 8
    other = free | {"algorithm": {"group_size": 16, "loss_args": {"clip_high": 0.3}}, "seed": 1}
    with pytest.raises(ConfigError) as caught:
        open_run_folder(build_config(tmp_path, **other))
    assert "algorithm.group_size was 8, is 16" in str(caught.value)
    assert "algorithm.loss_args" in str(caught.value)
    assert "seed was 42, is 1" in str(caught.value)
    assert "total_steps" not in str(caught.value)


def test_what_an_error_of_memory_advises_may_change_when_a_run_resumes(tmp_path):
    with open_run_folder(build_config(tmp_path)) as run:
        commit(run.paths, 4)
    less = {
        "trainer": {"max_tokens_per_row": 256, "logprob_chunk_tokens": 64, "has_gradient_checkpointing": True},
        "engine": {"kv_cache_tokens": 4096, "max_num_seqs": 8, "max_batched_tokens": 1024},
        "rollout": {"max_concurrency": 8},
    }
    with open_run_folder(build_config(tmp_path, continue_from_checkpoint=True, **less)) as run:
        assert load_section(RunConfig, run.paths.config).engine.max_num_seqs == 8
    engine = less["engine"] | {"weight_format": "fp8"}
    with pytest.raises(ConfigError, match=r"settings: engine.weight_format was 'model', is 'fp8'\. Restore"):
        open_run_folder(build_config(tmp_path, continue_from_checkpoint=True, **less | {"engine": engine}))


def test_a_run_resumes_at_another_address(tmp_path):
    """Its port may be taken, and the error says to choose another."""
    with open_run_folder(build_config(tmp_path, serve={"mode": "online"})) as run:
        commit(run.paths, 4)
    moved = {"mode": "online", "port": 9000, "max_requests": 64, "feedback_timeout_s": 60.0, "max_sessions": 9}
    changes = {"rollout": {"http_port": 9001}, "continue_from_checkpoint": True}
    with open_run_folder(build_config(tmp_path, serve=moved, **changes)) as run:
        assert load_section(RunConfig, run.paths.config).serve.port == 9000
    with pytest.raises(ConfigError, match=r"settings: serve.mode was 'online', is 'tasks'\. Restore"):
        open_run_folder(build_config(tmp_path, serve={"port": 9000}, **changes))


def test_a_run_is_not_resumed_with_other_rows_and_one_of_an_earlier_version_is(tmp_path):
    rows = {"train_dataset": "1", "eval_datasets.test": "2"}
    with open_run_folder(build_config(tmp_path), sources=rows) as run:
        log_steps(run.paths, 2)
    other = {"train_dataset": "3", "eval_datasets.test": None}
    again = build_config(tmp_path, continue_from_checkpoint=True)
    with open_run_folder(again, sources=other) as run:  # it starts again, as it has no checkpoint
        commit(run.paths, 4)
    with pytest.raises(
        ConfigError, match=r"first was made with other settings: the content of train_dataset changed\."
    ):
        open_run_folder(again, sources=rows)
    paths = RunPaths(tmp_path / "p" / "first")
    paths.sources.unlink()
    for _ in range(2):
        with open_run_folder(again, sources=rows) as run:
            assert run.committed_step == 4
    with pytest.raises(ConfigError, match="the content of eval_datasets.test changed"):
        open_run_folder(again, sources=rows | {"eval_datasets.test": "4"})


def test_all_keys_that_may_change_exist():
    for key in MUTABLE_KEYS:
        section = RunConfig
        for name in key.split("."):
            field = section.model_fields[name]
            default = field.get_default(call_default_factory=True)
            section = get_args(field.annotation)[0] if default is None and "." in key else type(default)


def test_only_one_process_opens_a_run_folder(tmp_path):
    config = build_config(tmp_path)
    resumed = build_config(tmp_path, continue_from_checkpoint=True)
    with open_run_folder(config), pytest.raises(StorageError, match=f"is locked by process {os.getpid()}"):
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
