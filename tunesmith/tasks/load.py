"""Load tasks from a folder, a file, a folder of `save_to_disk` or a hub id with Hugging Face `datasets`.

Every problem with a data set is a `DataError` of one sentence, raised before a model loads. Rows stay plain dicts; the
order of the file is the order of the tasks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, IterableDatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError
from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from tunesmith.config import DatasetSection
from tunesmith.errors import DataError, MissingDataError
from tunesmith.hub import describe_hub_failure, offline_if_unreachable
from tunesmith.storage import storage_errors
from tunesmith.tasks.data_path import check_data_path
from tunesmith.types import Task

FORMATS: Mapping[str, str] = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
SINGLE_SPLIT = "train"
"""The split name that `datasets` gives to a data set without splits."""
SAVED_SET, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Marker files that `save_to_disk` writes into the folder of a `Dataset` and of a `DatasetDict`."""


def load_tasks(dataset: DatasetSection, *, name: str) -> list[Task]:
    """Read all rows as tasks `<name>/<row index>` and check that they have the required fields."""
    rows = load_rows(dataset.path, name=dataset.name, split=dataset.split)
    if not rows:
        raise DataError(f"the data set {dataset.path!r} (split {dataset.split!r}) has no rows")
    check_required_fields(rows, dataset.required_fields, path=dataset.path)
    rows = [add_fields(row, dataset.fields) for row in rows]
    return [Task(task_id=f"{name}/{index}", index=index, row=row) for index, row in enumerate(rows)]


def add_fields(row: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The row with these fields, where it has none of the name."""
    return row | {name: value for name, value in fields.items() if row.get(name) is None}


def load_rows(path: str, *, name: str | None, split: str | None) -> list[dict[str, Any]]:
    """Read all rows of a split."""
    return _read(path, name=name, split=split, num_rows=None)


def load_jsonl(file: Path) -> list[Mapping[str, Any]]:
    """The objects of a JSON Lines file, without fields that only other rows have; blank lines are skipped."""
    with storage_errors(file, "read"):
        lines = file.read_bytes().splitlines()
    rows: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"line {number} of {str(file)!r} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"line {number} of {str(file)!r} must be a JSON object, got {type(row).__name__}")
        rows.append(row)
    return rows


def load_preview(path: str, *, name: str | None, split: str | None, num_rows: int) -> list[dict[str, Any]]:
    """Read the first rows of a split without reading the rest."""
    return _read(path, name=name, split=split, num_rows=num_rows)


def check_required_fields(rows: Sequence[Mapping[str, Any]], fields: Sequence[str], *, path: str) -> None:
    """Refuse rows that lack a field; `datasets` fills missing fields with None, so None counts as missing."""
    for index, row in enumerate(rows):
        for field in fields:
            if row.get(field) is None:
                raise DataError(
                    f"row {index} of {path!r} {describe_missing_field(row, field)}. Fix the data or change "
                    "required_fields"
                )


def describe_missing_field(row: Mapping[str, Any], field: str) -> str:
    """Why a field is missing: absent, or None because `datasets` fills in fields that only other rows have."""
    if field in row:
        return f"has no {field!r}: its value is empty (null, or not in this row)"
    return f"has no {field!r}; its fields are {', '.join(sorted(row))}"


def _read(path: str, *, name: str | None, split: str | None, num_rows: int | None) -> list[dict[str, Any]]:
    """The first `num_rows` rows of a split, streamed, or all rows if it is None."""
    check_data_path(path)
    source = Path(path).expanduser()
    if is_saved(source):
        return _read_saved(source, name=name, split=split, num_rows=num_rows)
    if source.is_file():
        arguments = _describe_file(source, name=name, split=split)
    else:
        arguments = {"path": str(source) if source.exists() else path, "name": name}
    try:
        with offline_if_unreachable(path):
            with hidden_progress_bars():
                loaded = load_dataset(**arguments, streaming=num_rows is not None)
            rows = _choose_split(loaded, split, path=path, is_file=source.is_file())
            return list(itertools.islice(rows, num_rows))
    except DataError:
        raise
    except StopIteration as error:
        raise DataError(f"the data set {path!r} has a file without rows") from error
    except (OSError, ValueError, TypeError, DatasetsError) as error:
        raise _explain(path, split, error) from error


@contextmanager
def hidden_progress_bars() -> Iterator[None]:
    """Within: `datasets` draws no bars into the console of the run."""
    are_shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if are_shown:
            enable_progress_bars()


def is_saved(source: Path) -> bool:
    """Whether `save_to_disk` of `datasets` wrote the folder."""
    return any((source / file).is_file() for file in (SAVED_SET, SAVED_SPLITS))


def _read_saved(source: Path, *, name: str | None, split: str | None, num_rows: int | None) -> list[dict[str, Any]]:
    """Rows of a folder written by `save_to_disk`: a `DatasetDict` has splits, a `Dataset` is a single split.

    The rows are memory-mapped, so a preview reads only what it shows.
    """
    if name is not None:
        raise DataError(f"name {name!r} has no effect: the folder {str(source)!r} has no configurations; remove name")
    try:
        loaded = load_from_disk(str(source))
        if isinstance(loaded, Dataset):
            rows = _check_saved_split(loaded, split, source)
        else:
            rows = _choose_split(loaded, split, path=str(source), is_file=False)
        return list(itertools.islice(rows, num_rows))
    except DataError:
        raise
    except (OSError, ValueError, TypeError, KeyError, DatasetsError) as error:
        raise _explain(str(source), split, error) from error


def _check_saved_split(saved: Dataset, split: str | None, source: Path) -> Dataset:
    """The saved data set; DataError if `split` is neither `train`, the folder's name nor the saved split's name."""
    known = {None, SINGLE_SPLIT, source.name, None if saved.split is None else str(saved.split)}
    if split not in known:
        raise DataError(
            f"split {split!r}: the folder {str(source)!r} is one split; set split to {SINGLE_SPLIT!r}, or give another "
            "folder"
        )
    return saved


def _describe_file(source: Path, *, name: str | None, split: str | None) -> dict[str, Any]:
    """Arguments of `load_dataset` for one file, which is a single split."""
    if source.suffix not in FORMATS:
        raise DataError(f"{str(source)!r} is not a data set file; allowed endings: {', '.join(FORMATS)}")
    if source.stat().st_size == 0:
        raise DataError(f"the data set {str(source)!r} has no rows")
    if split not in {None, SINGLE_SPLIT, source.stem}:
        raise DataError(
            f"split {split!r}: the file {str(source)!r} is one split; set split to {SINGLE_SPLIT!r}, or give its folder"
        )
    if name is not None:
        raise DataError(f"name {name!r} has no effect: the file {str(source)!r} has no configurations; remove name")
    return {"path": FORMATS[source.suffix], "data_files": {SINGLE_SPLIT: str(source)}}


def _choose_split(loaded: DatasetDict | IterableDatasetDict, split: str | None, *, path: str, is_file: bool) -> Any:
    if split is None or is_file:
        if len(loaded) > 1:
            raise DataError(f"{path!r} has the splits {', '.join(loaded)}; set split to one of them")
        return next(iter(loaded.values()))
    if split not in loaded:
        raise DataError(f"{path!r} has no split {split!r}; it has {', '.join(loaded)}")
    return loaded[split]


def _explain(path: str, split: str | None, error: Exception) -> DataError:
    if not Path(path).expanduser().exists():
        return MissingDataError(
            f"the data set {path!r} is not a local folder or file, and {describe_hub_failure()}; "
            "or give a folder or a file as its path"
        )
    reason = " ".join(str(error.__cause__ or error).split())
    return DataError(f"the data set {path!r} (split {split!r}) cannot be read: {reason[:300]}")
