"""Read and write the files of ET-Agent's code: JSON arrays, JSON lines and Parquet."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from tunesmith.errors import ConfigError, DataError
from tunesmith.et_agent.formats.records import AlpacaRow, EtQuestion, EvolveRow, RlRow, RolloutRow
from tunesmith.storage import open_atomic, storage_errors

Record: TypeAlias = EtQuestion | EvolveRow | AlpacaRow | RolloutRow | RlRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A file format of the original."""

    record: type[Record]
    container: Literal["array", "lines", "parquet"]
    description: str


FORMATS: dict[str, Format] = {
    "et_pool": Format(record=EtQuestion, container="array", description="source pool: question, answer, source"),
    "et_evolve": Format(record=EvolveRow, container="array", description="evolve buffers of the flywheel"),
    "et_rft": Format(record=AlpacaRow, container="array", description="fine-tuning rows in alpaca format"),
    "et_rollouts": Format(record=RolloutRow, container="array", description="rollouts, with or without scores"),
    "et_pareto": Format(record=RolloutRow, container="array", description="rollouts with Pareto ranks"),
    "et_rl": Format(record=RlRow, container="parquet", description="training rows of reinforcement learning"),
    "et_test": Format(record=EtQuestion, container="lines", description="test.jsonl of an evaluation set"),
}
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


def find_format(name: str) -> Format:
    if name not in FORMATS:
        raise ConfigError(f"unknown format {name!r}: the formats of ET-Agent are {', '.join(FORMATS)}")
    return FORMATS[name]


def load_records(path: Path | str, name: str) -> list[Record]:
    """The records of a file in the format of that name; DataError names the first malformed row."""
    form, file = find_format(name), Path(path).expanduser()
    with storage_errors(file, "read"):
        data = file.read_bytes()
    rows = _read_rows(data, form.container, file)
    records: list[Record] = []
    for index, row in enumerate(rows):
        where = f"row {index} of {str(file)!r}"
        if not isinstance(row, dict):
            raise DataError(f"{where} must be a JSON object, got {type(row).__name__}")
        records.append(form.record.read(row, where))
    return records


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


def save_records(path: Path | str, records: Sequence[Record], name: str) -> None:
    """Write records in the format of that name, in one piece."""
    form, file = find_format(name), Path(path).expanduser()
    wrong = next((each for each in records if not isinstance(each, form.record)), None)
    if wrong is not None:
        raise ConfigError(f"the format {name!r} holds {form.record.__name__}, not {type(wrong).__name__}")
    rows = [record.write() for record in records]
    with storage_errors(file, "write"):
        file.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(file) as opened:
            if form.container == "parquet":
                has_extra = any(record.extra for record in records)
                schema = pa.Table.from_pylist(rows).schema if has_extra else RL_SCHEMA
                pq.write_table(pa.Table.from_pylist(rows, schema=schema), opened)
            elif form.container == "lines":
                opened.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
            else:
                opened.write(json.dumps(rows, ensure_ascii=False, indent=2).encode())
