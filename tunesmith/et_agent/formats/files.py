"""The files of ET-Agent's code: JSON arrays, JSON lines and Parquet, whose rows are read and written as they are.

Fields that a format has beyond the known ones stay in the rows, so that reading and writing a file gives an equal file.
A missing or misaligned field is a DataError that names row and field.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from tunesmith.errors import DataError
from tunesmith.storage import encode_json_line, open_atomic, storage_errors

Row = dict[str, Any]
HEAD = ("instruction", "input", "answer", "source")
"""System prompt, question, answer or answers, and name of the set."""
QUESTION_KEYS = ("question", "input", "problem", "Question")
"""Fields of a pool or a test set that may hold its `question`."""
EVOLVE_LISTS = ("evolve_trajectories_buffer", "evolve_predictions", "evolve_trajectories_llm_judge_results")
"""Trajectories, of which the first is the first rollout, their answers and verdicts; empty after a timeout."""
ROLLOUT_LISTS = ("rollout_outputs", "predictions", "tool_counts")
"""The K rollouts of a question; the counts are `search_times`, `python_times` and `total_times`."""
PARETO_KEYS = ("score_tool", "score_corr", "rank", "distance")
"""Numbers of a row after Pareto sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A file format of the original."""

    container: Literal["array", "lines", "parquet"]
    fields: tuple[str, ...]
    """Fields that every row has."""
    lists: tuple[str, ...] = ()
    """Those with lists of one length."""


FORMATS: dict[str, Format] = {
    "et_pool": Format(container="array", fields=("question", "answer")),
    "et_evolve": Format(container="array", fields=HEAD, lists=EVOLVE_LISTS),
    "et_rft": Format(container="array", fields=("instruction", "input", "output")),
    "et_rollouts": Format(container="array", fields=HEAD, lists=ROLLOUT_LISTS),
    "et_pareto": Format(container="array", fields=HEAD, lists=ROLLOUT_LISTS),
    "et_rl": Format(container="parquet", fields=("prompt", "reward_model", "extra_info", "ability")),
    "et_test": Format(container="lines", fields=("question", "answer")),
}
"""Source pools; evolve buffers of the flywheel; fine-tuning rows of LLaMA-Factory's alpaca format; rollouts with or
without scores (`correctness`), and with Pareto ranks; training rows of reinforcement learning; evaluation sets."""
RL_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.list_(pa.string())), ("style", pa.string())])),
        (
            "extra_info",
            pa.struct(
                [
                    ("index", pa.int64()),
                    ("need_tools_kwargs", pa.bool_()),
                    ("question", pa.string()),
                    ("split", pa.string()),
                ]
            ),
        ),
        ("metadata", pa.null()),
    ]
)
"""Schema of the parquet file of the original."""


def load_records(path: Path | str, name: str) -> list[Row]:
    """The rows of a file in the format of that name; DataError names the first malformed row."""
    form, file = FORMATS[name], Path(path).expanduser()
    with storage_errors(file, "read"):
        data = file.read_bytes()
    rows = _read_rows(data, form.container, file)
    check_rows(rows, form, file)
    return rows


def check_rows(rows: Sequence[Any], form: Format, file: Path) -> None:
    """Raise DataError for a row that lacks a field of the format, or whose parallel lists differ in length."""
    for index, row in enumerate(rows):
        where = f"row {index} of {str(file)!r}"
        if not isinstance(row, dict):
            raise DataError(f"{where} must be a JSON object, got {type(row).__name__}")
        has_rollouts = form.lists == ROLLOUT_LISTS
        needed = (find_question_key(row) if key == "question" else key for key in (*form.fields, *form.lists))
        if missing := [key for key in needed if key not in row]:
            raise DataError(f"{where} has no {missing[0]!r}; its fields are {', '.join(row) or 'none'}")
        given = [key for key in PARETO_KEYS if key in row]
        if has_rollouts and 0 < len(given) < len(PARETO_KEYS):
            absent = next(key for key in PARETO_KEYS if key not in row)
            raise DataError(f"{where} has {given[0]!r}, but no {absent!r}")
        is_scored = has_rollouts and row.get("correctness") is not None
        lists = {key: row[key] for key in (*form.lists, *(("correctness",) if is_scored else ()))}
        for key, values in lists.items():
            if not isinstance(values, list):
                raise DataError(f"{where}: {key} must be a list, got {values!r:.80}")
        lengths = {key: len(values) for key, values in lists.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"{where}: parallel lists differ in length: {lengths}")


def find_question_key(row: Mapping[str, Any]) -> str:
    """The field with the question of a pool or a test set."""
    return next((key for key in QUESTION_KEYS if key in row), QUESTION_KEYS[0])


def _read_rows(data: bytes, container: str, file: Path) -> list[Any]:
    try:
        if container == "parquet":
            return list(pq.read_table(io.BytesIO(data)).to_pylist())
        if container == "lines":
            return [json.loads(line) for line in data.splitlines() if line.strip()]
        rows = json.loads(data)
    except (ValueError, pa.ArrowException) as error:
        what = "Parquet file" if container == "parquet" else "JSON file"
        raise DataError(f"{str(file)!r} is not a {what}: {str(error)[:200]}") from error
    if not isinstance(rows, list):
        raise DataError(f"{str(file)!r} must hold a JSON array of objects, got {type(rows).__name__}")
    return rows


def save_records(path: Path | str, rows: Sequence[Row], name: str) -> None:
    form, file = FORMATS[name], Path(path).expanduser()
    check_rows(rows, form, file)
    with storage_errors(file, "write"):
        file.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(file) as opened:
            if form.container == "parquet":
                pq.write_table(build_table(rows), opened)
            elif form.container == "lines":
                opened.writelines(map(encode_json_line, rows))
            else:
                opened.write(json.dumps(rows, ensure_ascii=False, indent=2).encode(errors="backslashreplace"))


def build_table(rows: Sequence[Row]) -> pa.Table:
    """The rows with the schema of the original, if it holds all of their values."""
    try:
        table = pa.Table.from_pylist(rows, schema=RL_SCHEMA)
    except pa.ArrowException:
        return pa.Table.from_pylist(rows)
    return table if table.to_pylist() == list(rows) else pa.Table.from_pylist(rows)
