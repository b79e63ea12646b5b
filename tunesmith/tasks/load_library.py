"""Rows of any data set that Hugging Face `datasets` reads: on the hub, in a folder, or in a file.

`tunesmith.tasks.load` imports this module for what it does not read itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, IterableDatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError
from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

from tunesmith.errors import DataError, MissingDataError
from tunesmith.hub import describe_hub_failure, offline_if_unreachable
from tunesmith.tasks.data_path import FORMATS, SINGLE_SPLIT, is_saved

NULL_ROW = re.compile(rb"\s*\[?\s*null\b")


def iter_library_rows(path: str, *, name: str | None, split: str | None, is_streamed: bool) -> Iterator[dict[str, Any]]:
    """The rows of a split; `is_streamed`: none is read before it is needed."""
    source = Path(path).expanduser()
    try:
        _check_first_rows(source)
        if is_saved(source):
            yield from _open_saved(source, name=name, split=split)
            return
        if source.is_file():
            arguments = _describe_file(source, name=name, split=split)
        else:
            arguments = {"path": str(source) if source.exists() else path, "name": name}
        with offline_if_unreachable(path):
            with silence():
                loaded = load_dataset(**arguments, streaming=is_streamed)
            yield from _choose_split(loaded, split, path=path, is_file=source.is_file())
    except DataError:
        raise
    except StopIteration as error:
        raise DataError(f"the data set {path!r} has a file without rows") from error
    except (OSError, ValueError, TypeError, KeyError, DatasetsError) as error:
        raise _explain(path, split, error) from error


def _check_first_rows(source: Path) -> None:
    """Refuse JSON files whose first row is null: reading them, `datasets` ends the process with a memory error."""
    for file in [source] if source.is_file() else source.rglob("*.json*"):
        if file.is_file():
            with file.open("rb") as rows:
                if NULL_ROW.match(rows.read(1000)):
                    raise DataError(f"the first row of {str(file)!r} is null; it must be a JSON object")


@contextmanager
def silence() -> Iterator[None]:
    """Within: `datasets` writes no bars to the console of the run, and no errors, which it raises as well."""
    are_shown, verbosity = not are_progress_bars_disabled(), logging.get_verbosity()
    disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if are_shown:
            enable_progress_bars()


def _open_saved(source: Path, *, name: str | None, split: str | None) -> Any:
    """The rows of a folder written by `save_to_disk`: a `DatasetDict` has splits, a `Dataset` is a single split.

    They are memory-mapped, so a preview reads only what it shows.
    """
    loaded = load_from_disk(str(source))
    is_single = isinstance(loaded, Dataset)
    splits = (source.name, str(loaded.split or source.name)) if is_single else None
    _refuse_parts("folder", source, name=name, split=split, splits=splits)
    return loaded if is_single else _choose_split(loaded, split, path=str(source), is_file=False)


def _describe_file(source: Path, *, name: str | None, split: str | None) -> dict[str, Any]:
    """Arguments of `load_dataset` for one file, which is a single split."""
    if source.suffix not in FORMATS:
        raise DataError(f"{str(source)!r} is not a data set file; allowed endings: {', '.join(FORMATS)}")
    if source.stat().st_size == 0:
        raise DataError(f"the data set {str(source)!r} has no rows")
    _refuse_parts("file", source, name=name, split=split, splits=(source.stem,))
    return {"path": FORMATS[source.suffix], "data_files": {SINGLE_SPLIT: str(source)}}


def _refuse_parts(
    kind: str, source: Path, *, name: str | None, split: str | None, splits: tuple[str, ...] | None
) -> None:
    """Refuse a configuration, and of a single split any name but `train` and `splits`."""
    if name is not None:
        raise DataError(f"name {name!r} has no effect: the {kind} {str(source)!r} has no configurations; remove name")
    if splits is not None and split not in (None, SINGLE_SPLIT, *splits):
        raise DataError(
            f"split {split!r}: the {kind} {str(source)!r} is one split; set split to {SINGLE_SPLIT!r}, or give "
            f"{'its' if kind == 'file' else 'another'} folder"
        )


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
    reason = " ".join(str(error.__cause__ or error).split()).replace("BuilderConfig ", "name ")  # the key of a data set
    found = "has no rows" if "corresponds to no data" in reason else f"cannot be read: {reason[:300]}"  # a header alone
    return DataError(f"the data set {path!r} (split {split or SINGLE_SPLIT!r}) {found}")
