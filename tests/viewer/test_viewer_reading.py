"""Run folders are read lazily and followed while they are written."""

from __future__ import annotations

import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from viewer_runs import GROUP_SIZE, NUM_STEPS, TOKENIZER, encode, write_comparison, write_run, write_step

from tunesmith.errors import StorageError
from tunesmith.experience.step_files import StepFiles
from tunesmith.experience.store import ROLLOUT_STEPS, RolloutFiles
from tunesmith.storage import RunPaths, save_text
from tunesmith.viewer.answers.overview import describe_runs
from tunesmith.viewer.reading.rollout_index import RolloutIndex, find_known, read_numbers
from tunesmith.viewer.reading.run import find_new_runs, open_runs


def test_rows_come_from_merged_and_single_files(run_folder):
    files = RolloutFiles(run_folder / "rollouts")
    assert files.list_steps() == [1, 2, 3, 4]
    assert [path.name for path, _ in files.list_files()] == [
        "step_000004.parquet", "step_000003.parquet", "steps_000001-000002.parquet",
    ]  # fmt: skip
    for step in (1, 2, 3):
        rows = list(files.iter_rows(step, ["run_index", "step", "response_text"], first=2, num_rows=3))
        assert [row["run_index"] for row in rows] == [2, 0, 1] and {row["step"] for row in rows} == {step}
    with pytest.raises(StorageError, match="no rollouts of step 9"):
        list(files.iter_rows(9, ["run_index"]))


def test_the_index_has_one_row_per_trajectory(run_folder):
    index = RolloutIndex(RolloutFiles(run_folder / "rollouts"))
    assert index.extend() and index.num_rows == NUM_STEPS * 2 * GROUP_SIZE
    assert [rows["step"][0] for rows in index.iter_rows()] == [4, 3, 1]
    row = index.find_step(1)[0]
    assert (row["reward"], row["advantage"], row["num_turns"]) == (0.0, -0.5, 2)
    assert np.isnan(index.find_step(2)["reward"]).sum() == 1
    assert [cause.error for cause in index.causes] == ["ValueError"]
    assert set(index.find_task("train/1")["step"]) == {1, 2, 3, 4} and len(index.find_task("train/9")) == 0


def test_the_index_is_built_within_a_time_limit_and_continued(run_folder):
    index = RolloutIndex(RolloutFiles(run_folder / "rollouts"))
    assert not index.extend(limit_s=-1.0) and index.num_rows == 0
    assert len(index.find_step(3)) == 2 * GROUP_SIZE, "a step that is not indexed yet is read"
    assert index.extend(limit_s=60.0)


def test_the_index_follows_new_and_merged_files(tmp_path):
    root = write_run(tmp_path / "run", has_merged=False)
    paths = RunPaths(root)
    index = RolloutIndex(RolloutFiles(root / "rollouts"))
    index.extend()
    write_step(paths, 5, num_groups=2)
    StepFiles(root / "rollouts", ROLLOUT_STEPS).merge(committed_step=4, steps_per_file=4)
    assert len(index.find_step(5)) == 2 * GROUP_SIZE
    index.extend()
    assert index.num_rows == 5 * 2 * GROUP_SIZE and index.num_files == 2
    write_step(paths, 5, num_groups=1)
    assert len(index.find_step(5)) == GROUP_SIZE, "a step that was written again is read again"


def test_counts_of_older_files_come_from_the_turns(tmp_path):
    root = write_run(tmp_path / "run", has_merged=False)
    newer = RolloutIndex(RolloutFiles(root / "rollouts"))
    newer.extend()
    for path in (root / "rollouts").glob("*.parquet"):
        columns = ["num_turns", "num_sampled_tokens", "failure_traceback", "untrained_turns"]
        pq.write_table(pq.read_table(path).drop_columns(columns), path)
    older = RolloutIndex(RolloutFiles(root / "rollouts"))
    older.extend()
    for name in ("num_tokens", "num_turns"):
        assert [rows[name].tolist() for rows in older.iter_rows()] == [
            rows[name].tolist() for rows in newer.iter_rows()
        ]
    assert older.find_step(1)["num_tokens"].min() > 0
    StepFiles(root / "rollouts", ROLLOUT_STEPS).merge(committed_step=4, steps_per_file=4)
    older.extend()
    assert older.find_step(1)["num_tokens"].min() > 0, "the columns that a merged file has are empty"
    (run,) = open_runs([root])
    assert run.load_rollout(1, 0, 2).trajectory.failure.traceback is None


def test_folders_of_runs_are_found(run_folder, tmp_path):
    write_run(tmp_path / "project" / "a")
    write_run(tmp_path / "project" / "b")
    write_comparison(tmp_path / "project" / "eval")
    (tmp_path / "project" / "a" / "old-2025").mkdir()
    runs = open_runs([tmp_path, run_folder, run_folder / "global_step_4"])
    assert [run.name for run in runs] == ["a", "b", "eval", "sums"]
    with pytest.raises(StorageError, match="there is no such folder"):
        open_runs([tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match="has no metrics.jsonl or comparison.json"):
        open_runs([tmp_path / "empty"])


def test_runs_that_start_later_are_appended(tmp_path):
    runs, paths = [], [str(tmp_path / "project")]
    find_new_runs(runs, paths)
    assert runs == [], "the folder may be gone"
    for folder, names in (("b/x", ["x"]), ("a/y", ["x", "y"]), ("a/x", ["b/x", "a/y", "a/x"])):
        save_text(tmp_path / "project" / folder / "metrics.jsonl", "")
        find_new_runs(runs, paths)
        assert [run.name for run in runs] == names, "numbers of runs stay, names tell them apart"
    shutil.rmtree(runs[0].root)  # as a run does that fails before its first step
    find_new_runs(runs, paths)
    assert [each["state"] for each in describe_runs(runs)["runs"]] == ["removed", "interrupted", "interrupted"]


def test_rollouts_are_decoded_before_the_first_checkpoint(run_folder, tmp_path):
    shutil.copytree(run_folder, tmp_path / "run", ignore=shutil.ignore_patterns("global_step_*"))
    (run,) = open_runs([tmp_path])
    assert run.text is None
    TOKENIZER.save_pretrained(run.paths.tokenizer)
    assert run.text.decode_batch([encode("The answer")]) == ["The answer"]


def test_token_text_keeps_characters_of_several_tokens_whole(run):
    ids = encode("héllo 世界 🙂 done")
    pieces = run.text.split(ids)
    assert len(pieces) == len(ids) and "".join(pieces) == "héllo 世界 🙂 done"
    assert run.text.split([10**6]) == ["<1000000>"]
    marked = run.text.decode_marked(encode("<|im_start|>user\n\x02x\x03"))
    assert marked.startswith("\x02<|im_start|>\x03user\n") and marked.count("\x02") == 1


def test_numbers_with_and_without_nulls_are_read():
    column = pa.chunked_array([pa.array([1.5, None]), pa.array([None, 2.5])])
    assert read_numbers(column).tolist()[::3] == [1.5, 2.5] and np.isnan(read_numbers(column)[1:3]).all()
    assert find_known(column.slice(1, 3)).tolist() == [False, False, True]
    assert read_numbers(column.slice(3)).tolist() == [2.5]
    assert (
        read_numbers(pa.array([3, 4], pa.int32())).tolist() == [3, 4]
        and len(read_numbers(pa.array([], pa.int32()))) == 0
    )


def test_reading_imports_no_slow_library(run_folder):
    program = """
import sys
from tunesmith.viewer.answers.table import Answers
from tunesmith.viewer.reading.run import open_runs
answers = Answers(open_runs([sys.argv[1]]))
paths = ("runs", "step/0/3", "rollout/0/3/0/0", "search/0", "failures/0", "trie/0/3/0", "evaluations", "diagnosis/0")
for path in paths:
    answers.get(path, {})
print(sorted({"torch", "transformers", "pandas", "datasets"} & sys.modules.keys()))
"""
    found = subprocess.run([sys.executable, "-c", program, str(run_folder)], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_damaged_files_are_named(tmp_path):
    root = write_run(tmp_path / "run")
    rollouts, tokenizer = root / "rollouts/step_000004.parquet", root / "global_step_4/tokenizer.json"
    data = bytearray(rollouts.read_bytes())
    data[100:300] = bytes(200)  # pages; the footer stays
    rollouts.write_bytes(data)
    (run,) = open_runs([root])
    for read in (lambda: run.index.find_step(4), lambda: run.index.extend(), lambda: run.load_group(4, 0)):
        with pytest.raises(StorageError, match="cannot read .*step_000004.parquet"):
            read()
    tokenizer.write_bytes(tokenizer.read_bytes()[:1000])
    with pytest.raises(StorageError, match="cannot read .*tokenizer.json: it is not a tokenizer"):
        print(run.text)
