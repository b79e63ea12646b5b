"""Rollouts on disk: one Parquet file per step, one row per trajectory, with an exact round trip.

Turns are nested lists, so any Parquet reader can query lengths or logprobs. A task's row is JSON text: values that are
not JSON (dates, images) are stored as `str(value)`, tuples come back as lists. Text that is not valid Unicode (half of
a surrogate pair) is stored with U+FFFD instead; everything else round-trips bit for bit. Parquet pages have checksums.
Steps of long runs are merged into files with one row group per step.

`RolloutFiles` reads the rows of one step with only the columns asked for. Steps are listed from file names, and rows
are read in small batches, so that memory does not grow with the size of a step. A file that was merged with others
between listing and reading is looked up again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tunesmith.errors import StorageError
from tunesmith.experience.step_files import SINGLE, StepFiles, StepFormat, locate_step
from tunesmith.storage import clean_text, open_atomic, storage_errors
from tunesmith.types import Distribution, Failure, Group, RunAdvantage, Task, Trajectory, Turn

FORMAT = "1"

DISTRIBUTION = pa.struct(
    {
        "temperature": pa.float64(),
        "top_p": pa.float64(),
        "top_k": pa.int32(),
        "min_p": pa.float64(),
        "logit_bias": pa.list_(pa.struct({"token_id": pa.int32(), "value": pa.float64()})),
        "repetition_penalty": pa.float64(),
        "presence_penalty": pa.float64(),
        "frequency_penalty": pa.float64(),
        "min_tokens": pa.int32(),
        "end_ids": pa.list_(pa.int32()),
        "bad_words": pa.list_(pa.list_(pa.int32())),
        "grammar": pa.string(),
    }
)
TURN = pa.struct(
    {
        "prompt_ids": pa.list_(pa.int32()),
        "sampled_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float64()),
        "policy_versions": pa.list_(pa.int32()),
        "distribution": DISTRIBUTION,
        "stop_reason": pa.string(),
    }
)
SCHEMA = pa.schema(
    {
        "group_index": pa.int32(),
        "run_index": pa.int32(),
        "task_id": pa.string(),
        "task_index": pa.int64(),
        "task_row": pa.string(),
        "reward": pa.float64(),
        "advantage": pa.float64(),
        "turn_advantages": pa.list_(pa.float64()),
        "baseline_reward": pa.float64(),
        "failure_where": pa.string(),
        "failure_message": pa.string(),
        "failure_line": pa.string(),
        "failure_traceback": pa.string(),
        "response_text": pa.string(),
        "duration_s": pa.float64(),
        "metrics": pa.map_(pa.string(), pa.float64()),
        "turns": pa.list_(TURN),
        "num_turns": pa.int32(),
        "num_sampled_tokens": pa.int64(),
        "untrained_turns": pa.list_(pa.int32()),
        "step": pa.int32(),
        "parent": pa.int32(),
        "branch_at": pa.int32(),
        "num_shared_turns": pa.int32(),
    },
    metadata={"tunesmith.rollouts": FORMAT},
)
WRITING: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}


def save_rollouts(
    path: Path, groups: Sequence[Group], advantages: Sequence[Sequence[RunAdvantage]] | None = None
) -> None:
    """Write the trajectories of one step; `advantages[g][r]` belongs to `groups[g].trajectories[r]`.

    With one advantage per turn, column `advantage` is their mean.
    """
    if advantages is None:
        advantages = [[None] * len(group.trajectories) for group in groups]
    rows = []
    for index, (group, group_advantages) in enumerate(zip(groups, advantages, strict=True)):
        assert group.trajectories, "a group has trajectories"
        for trajectory, advantage in zip(group.trajectories, group_advantages, strict=True):
            row = {"group_index": index, "baseline_reward": group.baseline_reward, "advantage": advantage}
            if isinstance(advantage, tuple):
                row |= {"advantage": fmean(advantage or (0.0,)), "turn_advantages": advantage}
            rows.append(row | build_row(trajectory))
    match = SINGLE.fullmatch(path.name)
    table = set_step(pa.Table.from_pylist(rows, schema=SCHEMA), None if match is None else int(match[1]))
    with open_atomic(path) as file:
        pq.write_table(table, file, **WRITING)


def load_rollouts(path: Path) -> list[Group]:
    """Read the groups that `save_rollouts` wrote as `path`, also after the file has been merged with others."""
    table = load_table(path)
    groups = []
    for _, group_rows in groupby(table.to_pylist(), key=lambda row: row["group_index"]):
        rows = list(group_rows)
        trajectories = parse_group(rows)
        baseline_reward = rows[0].get("baseline_reward")
        groups.append(Group(task=trajectories[0].task, trajectories=trajectories, baseline_reward=baseline_reward))
    return groups


def load_table(path: Path) -> pa.Table:
    """The rows that were saved as `path`; StorageError if they are missing or damaged."""
    with open_step(path) as (parquet, row_groups):
        return parquet.read_row_groups(row_groups)


@contextmanager
def open_step(path: Path) -> Iterator[tuple[pq.ParquetFile, list[int]]]:
    """The file that holds what was saved as `path`, looked up again if it is merged meanwhile, and its row groups."""
    stored_path, step = locate_step(path, ROLLOUT_STEPS.merged)
    try:
        opened = open_rollouts(stored_path)
    except StorageError:
        again, step = locate_step(path, ROLLOUT_STEPS.merged)
        if again == stored_path:
            raise
        stored_path, opened = again, open_rollouts(again)
    with reading(stored_path), opened as parquet:
        yield parquet, find_row_groups(parquet, step)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert the errors of the file system, and of a file that is not Parquet, into a StorageError."""
    with storage_errors(path, "read"):
        try:
            yield
        except pa.ArrowInvalid as error:
            raise StorageError(f"cannot read {path}: it is not a Parquet file ({error})") from error


def find_row_groups(parquet: pq.ParquetFile, step: int | None) -> list[int]:
    """The row groups of a step in a merged file; None: all, in the file of a single step."""
    if step is None:
        return list(range(parquet.num_row_groups))
    return [row_group for row_group, each in enumerate(find_steps(parquet)) if each == step]


def find_steps(parquet: pq.ParquetFile) -> list[int]:
    """The step that all rows of a row group belong to, from the file's statistics or its first row; -1 if it is not
    recorded."""
    metadata = parquet.metadata
    column = next((i for i in range(metadata.num_columns) if metadata.schema.column(i).path == "step"), None)
    if column is None:
        return [-1] * metadata.num_row_groups
    steps = []
    for row_group in range(metadata.num_row_groups):
        statistics = metadata.row_group(row_group).column(column).statistics
        if statistics is not None and statistics.has_min_max:
            step = statistics.min
        else:
            step = parquet.read_row_group(row_group, columns=["step"]).column(0)[0].as_py()
        steps.append(-1 if step is None else int(step))
    return steps


def merge_rollouts(target: Path, single: Mapping[int, Path]) -> None:
    """Write one file with one row group per step; steps without rows have none."""
    with open_atomic(target) as file, pq.ParquetWriter(file, SCHEMA, **WRITING) as writer:
        for step, path in sorted(single.items()):
            table = set_step(load_table(path), step)
            if len(table):
                writer.write_table(table, row_group_size=len(table))


def truncate_rollouts(source: Path, target: Path, last: int) -> None:
    with (
        reading(source),
        open_rollouts(source) as parquet,
        open_atomic(target) as file,
        pq.ParquetWriter(file, SCHEMA, **WRITING) as writer,
    ):
        for index, step in enumerate(find_steps(parquet)):
            if step <= last:
                table = set_step(parquet.read_row_group(index), step)
                writer.write_table(table, row_group_size=len(table))


def set_step(table: pa.Table, step: int | None) -> pa.Table:
    """The columns of `SCHEMA` with `step` set; columns and nested fields that an older file lacks are null."""
    steps = pa.array([step] * len(table), type=pa.int32())
    columns = [steps if field.name == "step" else read_column(table, field) for field in SCHEMA]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def read_column(table: pa.Table, field: pa.Field) -> pa.Array | pa.ChunkedArray:
    if field.name not in table.column_names:
        return pa.nulls(len(table), type=field.type)
    column = table.column(field.name)
    return column if column.type == field.type else pa.array(column.to_pylist(), type=field.type)


def build_row(trajectory: Trajectory) -> dict[str, Any]:
    """One trajectory as a row of `SCHEMA`."""
    task, failure = trajectory.task, trajectory.failure
    return {
        "run_index": trajectory.run_index,
        "task_id": clean_text(task.task_id),
        "task_index": task.index,
        "task_row": json.dumps(dict(task.row), default=str),
        "reward": trajectory.reward,
        "failure_where": failure.where if failure is not None else None,
        "failure_message": clean_text(failure.message) if failure is not None else None,
        "failure_line": clean_text(failure.line) if failure is not None and failure.line is not None else None,
        "failure_traceback": clean_text(failure.traceback) if failure is not None and failure.traceback else None,
        "response_text": clean_text(trajectory.response_text),
        "duration_s": trajectory.duration_s,
        "metrics": [(clean_text(name), value) for name, value in trajectory.metrics.items()],
        "turns": [build_turn(turn) for turn in trajectory.turns],
        "parent": trajectory.parent,
        "branch_at": trajectory.branch_at,
        "num_shared_turns": trajectory.num_shared_turns,
        "num_turns": len(trajectory.turns),
        "num_sampled_tokens": trajectory.num_sampled_tokens,
        "untrained_turns": [index for index, turn in enumerate(trajectory.turns) if not turn.is_trained] or None,
    }


def build_turn(turn: Turn) -> dict[str, Any]:
    distribution = turn.distribution
    return {
        "prompt_ids": turn.prompt_ids,
        "sampled_ids": turn.sampled_ids,
        "logprobs": turn.logprobs,
        "policy_versions": turn.policy_versions,
        "distribution": {each.name: getattr(distribution, each.name) for each in DISTRIBUTION}
        | {"logit_bias": [{"token_id": token, "value": value} for token, value in distribution.logit_bias]},
        "stop_reason": turn.stop_reason,
    }


def parse_group(rows: Sequence[dict[str, Any]]) -> tuple[Trajectory, ...]:
    """The trajectories of a group from all of its rows; a branch follows its parent."""
    runs: dict[int, Trajectory] = {}
    for row in rows:
        run = parse_row(row)
        if run.parent in runs:
            run = replace(run, turn_owners=(runs[run.parent].turn_owners + run.turn_owners)[: run.num_shared_turns])
        runs[run.run_index] = run
    return tuple(runs.values())


def parse_row(row: dict[str, Any]) -> Trajectory:
    """The inverse of `build_row`, except that all turns that a branch shares are its parent's."""
    failure = None
    if row["failure_where"] is not None:
        failure = Failure(
            where=row["failure_where"],
            message=row["failure_message"],
            line=row.get("failure_line"),
            traceback=row.get("failure_traceback"),
        )
    untrained = row.get("untrained_turns") or ()
    return Trajectory(
        task=Task(task_id=row["task_id"], index=row["task_index"], row=json.loads(row["task_row"])),
        run_index=row["run_index"],
        turns=tuple(parse_turn(turn, is_trained=index not in untrained) for index, turn in enumerate(row["turns"])),
        reward=row["reward"],
        metrics=dict(row["metrics"]),
        failure=failure,
        response_text=row["response_text"],
        duration_s=row["duration_s"],
        parent=row.get("parent"),
        branch_at=row.get("branch_at"),
        turn_owners=tuple([row["parent"]] * row["num_shared_turns"] if row.get("num_shared_turns") else ()),
    )


def parse_turn(turn: dict[str, Any], *, is_trained: bool = True) -> Turn:
    """The inverse of `build_turn`; `is_trained` comes from column `untrained_turns` of the row."""
    distribution = {name: value for name, value in turn["distribution"].items() if value is not None}  # older files
    lists = {"logit_bias": tuple((pair["token_id"], pair["value"]) for pair in distribution["logit_bias"])}
    lists |= {"end_ids": tuple(distribution.get("end_ids", ()))}
    lists |= {"bad_words": tuple(map(tuple, distribution.get("bad_words", ())))}
    return Turn(
        prompt_ids=tuple(turn["prompt_ids"]),
        sampled_ids=tuple(turn["sampled_ids"]),
        logprobs=tuple(turn["logprobs"]),
        policy_versions=tuple(turn["policy_versions"]),
        distribution=Distribution(**(distribution | lists)),
        stop_reason=turn["stop_reason"],
        is_trained=is_trained,
    )


ROLLOUT_STEPS = StepFormat(single="parquet", merged="parquet", merge=merge_rollouts, truncate=truncate_rollouts)


BATCH_ROWS = 64


class RolloutFiles:
    """Rollout files of one run; read only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = StepFiles(folder, ROLLOUT_STEPS)

    def list_steps(self) -> list[int]:
        """Steps that have rollouts, in ascending order."""
        return self._files.list_steps()

    def list_files(self) -> list[tuple[Path, int]]:
        """Every file with its last step, newest first; a merged file replaces the files of its steps."""
        merged = self._files.find_merged()
        is_merged = {step for each in merged for step in range(each.first, each.last + 1)}
        files = [(path, step) for step, path in self._files.find_single().items() if step not in is_merged]
        return sorted([*files, *((each.path, each.last) for each in merged)], key=lambda file: -file[1])

    def iter_rows(
        self, step: int, columns: Sequence[str], *, first: int = 0, num_rows: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Rows `first` and later of a step, at most `num_rows`; columns that the file lacks are None."""
        remaining, skipped = num_rows, first
        with open_step(self._locate(step)[0]) as (parquet, row_groups):
            stored = keep_stored(parquet, columns)
            for batch in parquet.iter_batches(BATCH_ROWS, row_groups=row_groups, columns=stored, use_threads=False):
                if skipped >= len(batch):
                    skipped -= len(batch)
                    continue
                part = batch.slice(skipped, remaining)
                skipped = 0
                yield from ({name: row.get(name) for name in row.keys() | columns} for row in part.to_pylist())
                if remaining is not None:
                    remaining -= len(part)
                    if remaining <= 0:
                        return

    def read_table(self, step: int, columns: Sequence[str]) -> pa.Table:
        """Columns of all rows of a step; those that the file lacks are left out."""
        with open_step(self._locate(step)[0]) as (parquet, row_groups):
            return parquet.read_row_groups(row_groups, keep_stored(parquet, columns), use_threads=False)

    def stamp(self, step: int) -> tuple[int, int]:
        """Modification time and size of the file that holds a step; they change when it is written again."""
        _, path = self._locate(step)
        with storage_errors(path, "read"):
            stat = path.stat()
        return stat.st_mtime_ns, stat.st_size

    def _locate(self, step: int) -> tuple[Path, Path]:
        """The path that a step was saved as, and that of the file which holds it now."""
        path = self._folder / f"step_{step:06d}.{ROLLOUT_STEPS.single}"
        stored_path, _ = locate_step(path, ROLLOUT_STEPS.merged)
        if not stored_path.exists():
            raise StorageError(f"there are no rollouts of step {step} in {self._folder}")
        return path, stored_path


def open_rollouts(path: Path) -> pq.ParquetFile:
    with reading(path):
        path.stat()  # without the file this error is shorter than pyarrow's
        parquet = pq.ParquetFile(path, page_checksum_verification=True)
    found = (parquet.schema_arrow.metadata or {}).get(b"tunesmith.rollouts", b"").decode()
    if found != FORMAT:
        raise StorageError(f"cannot read {path}: expected rollouts of format {FORMAT}, found {found or 'none'}")
    return parquet


def keep_stored(parquet: pq.ParquetFile, columns: Sequence[str]) -> list[str]:
    """The columns that the file has; `turns.sampled_ids` is field `sampled_ids` of column `turns`."""
    names = set(parquet.schema_arrow.names)
    unknown = [name for name in columns if name.split(".")[0] not in SCHEMA.names]
    assert not unknown, f"rollouts have no columns {unknown}"
    return [name.replace(".", ".list.element.") for name in columns if name.split(".")[0] in names]
