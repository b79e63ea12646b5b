"""Single-step and merged files: a merge that is killed at any point loses no step."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from killed_runs import kill_at_call
from tunesmith.errors import StorageError
from tunesmith.experience.step_files import JSON_STEPS, StepFiles, load_step_json
from tunesmith.experience.store import ROLLOUT_STEPS, load_rollouts, save_rollouts
from tunesmith.storage import save_json
from tunesmith.types import Group, Task, Trajectory


def build_groups(step: int) -> list[Group]:
    task = Task(task_id=f"task/{step}", index=step, row={"step": step})
    return [Group(task=task, trajectories=(Trajectory(task=task, run_index=0, turns=(), reward=step / 7),))]


def name_step(folder: Path, step: int, suffix: str = "parquet") -> Path:
    return folder / f"step_{step:06d}.{suffix}"


def save_steps(folder: Path, first: int, last: int) -> StepFiles:
    for step in range(first, last + 1):
        save_rollouts(name_step(folder, step), build_groups(step))
    return StepFiles(folder, ROLLOUT_STEPS)


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_readable(folder: Path, first: int, last: int) -> None:
    for step in range(first, last + 1):
        assert load_rollouts(name_step(folder, step)) == build_groups(step)


def test_committed_steps_are_merged_and_read_by_their_single_file_name(tmp_path):
    files = save_steps(tmp_path, 1, 11)
    files.merge(committed_step=10, steps_per_file=4)
    assert list_names(tmp_path) == [
        "step_000009.parquet", "step_000010.parquet", "step_000011.parquet",
        "steps_000001-000004.parquet", "steps_000005-000008.parquet",
    ]  # fmt: skip
    assert_readable(tmp_path, 1, 11)
    rows = pq.read_table(tmp_path / "steps_000005-000008.parquet").to_pylist()
    assert [(row["step"], row["task_id"]) for row in rows] == [(step, f"task/{step}") for step in range(5, 9)]
    with pytest.raises(StorageError, match=r"step_000012\.parquet: No such file"):
        load_rollouts(name_step(tmp_path, 12))


def test_text_that_is_not_valid_unicode_is_merged(tmp_path):
    values = [{"tasks": ["task/\ud800", "\u00e4"]}, {"tasks": []}]
    for step, value in enumerate(values, 1):
        save_json(name_step(tmp_path, step, "json"), value)
    StepFiles(tmp_path, JSON_STEPS).merge(committed_step=2, steps_per_file=2)
    assert [load_step_json(name_step(tmp_path, step, "json")) for step in (1, 2)] == values


def test_uncommitted_steps_and_ranges_of_one_step_are_not_merged(tmp_path):
    files = save_steps(tmp_path, 1, 4)
    before = list_names(tmp_path)
    files.merge(committed_step=4, steps_per_file=1)
    files.merge(committed_step=3, steps_per_file=4)
    assert list_names(tmp_path) == before


def test_files_of_an_older_version_are_merged(tmp_path):
    files = save_steps(tmp_path, 1, 2)
    for step in (1, 2):
        path = name_step(tmp_path, step)
        table = pq.read_table(path).drop_columns(["step", "turn_advantages"])
        pq.write_table(table, path)
    files.merge(committed_step=2, steps_per_file=2)
    assert list_names(tmp_path) == ["steps_000001-000002.parquet"]
    assert_readable(tmp_path, 1, 2)


def test_a_step_without_rollouts_is_merged(tmp_path):
    files = save_steps(tmp_path, 1, 3)
    save_rollouts(name_step(tmp_path, 2), [])
    files.merge(committed_step=3, steps_per_file=3)
    assert [len(load_rollouts(name_step(tmp_path, step))) for step in (1, 2, 3)] == [1, 0, 1]


def test_a_damaged_file_stops_the_merge_without_data_loss(tmp_path):
    files = save_steps(tmp_path, 1, 3)
    name_step(tmp_path, 2).write_bytes(b"PAR1")
    before = list_names(tmp_path)
    with pytest.raises(StorageError, match=r"step_000002\.parquet"):
        files.merge(committed_step=3, steps_per_file=3)
    assert list_names(tmp_path) == before


@pytest.mark.parametrize("is_merged", [False, True])
def test_a_changed_byte_is_detected_or_changes_no_row(tmp_path, is_merged):
    files = save_steps(tmp_path, 1, 2)
    if is_merged:
        files.merge(committed_step=2, steps_per_file=2)
    path = min(tmp_path.iterdir())
    content = path.read_bytes()
    num_found = 0
    offsets = range(4, pq.ParquetFile(path).metadata.row_group(0).total_byte_size, 37)
    for offset in offsets:
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 16]) + content[offset + 1 :])
        try:
            assert load_rollouts(name_step(tmp_path, 1)) == build_groups(1)
        except StorageError:
            num_found += 1
    assert num_found > len(offsets) // 3


def test_a_merged_file_is_split_at_an_earlier_step(tmp_path):
    files = save_steps(tmp_path, 1, 6)
    files.merge(committed_step=6, steps_per_file=6)
    files.split_merged(4)
    assert [path.name for path in files.find_after(4)] == ["steps_000001-000006.parquet"]
    for path in list(files.find_after(4)):
        path.unlink()
    assert list_names(tmp_path) == ["steps_000001-000004.parquet"]
    assert_readable(tmp_path, 1, 4)
    save_steps(tmp_path, 5, 12)
    files.merge(committed_step=12, steps_per_file=6)
    assert list_names(tmp_path) == [
        "steps_000001-000004.parquet", "steps_000005-000006.parquet", "steps_000007-000012.parquet"
    ]  # fmt: skip
    assert_readable(tmp_path, 1, 12)


def test_selections_are_merged_into_json_lines(tmp_path):
    files = StepFiles(tmp_path, JSON_STEPS)
    saved = {step: {"choices": [{"index": step, "why": "\u2028"}], "summary": {}} for step in (1, 2, 4)}
    for step, value in saved.items():
        save_json(name_step(tmp_path, step, "json"), value)
    files.merge(committed_step=4, steps_per_file=4)
    assert list_names(tmp_path) == ["steps_000001-000004.jsonl"]
    assert {step: load_step_json(name_step(tmp_path, step, "json")) for step in saved} == saved
    with pytest.raises(StorageError, match="does not hold this step"):
        load_step_json(name_step(tmp_path, 3, "json"))
    files.split_merged(2)
    lines = (tmp_path / "steps_000001-000002.jsonl").read_text().split("\n")[:-1]
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_half_of_a_surrogate_pair_in_a_reason_is_merged(tmp_path):
    for step in (1, 2):
        save_json(name_step(tmp_path, step, "json"), {"reason": "a \ud800"})
    StepFiles(tmp_path, JSON_STEPS).merge(committed_step=2, steps_per_file=2)
    assert list_names(tmp_path) == ["steps_000001-000002.jsonl"]
    assert load_step_json(name_step(tmp_path, 2, "json")) == {"reason": "a \ud800"}


def test_a_kill_at_any_write_call_loses_no_step(tmp_path):
    for number in range(1, 100):
        folder = tmp_path / str(number)
        folder.mkdir()
        files = save_steps(folder, 1, 5)
        child = os.fork()
        if child == 0:
            try:
                kill_at_call(number)
                files.merge(committed_step=4, steps_per_file=2)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        assert_readable(folder, 1, 5)
        files.remove_single_after(5)
        files.merge(committed_step=4, steps_per_file=2)
        assert list_names(folder) == [
            "step_000005.parquet",
            "steps_000001-000002.parquet",
            "steps_000003-000004.parquet",
        ]
        assert_readable(folder, 1, 5)
        if not os.WIFSIGNALED(status):
            break
    assert number > 10
