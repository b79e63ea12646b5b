"""Passages of a corpus, read one by one: JSON Lines, Hugging Face data sets, folders of text files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.errors import DataError
from tunesmith.retrieval.settings import IndexSettings
from tunesmith.tasks.data_path import check_data_path, is_saved
from tunesmith.tasks.load import iter_jsonl


@dataclass(frozen=True, slots=True)
class Passage:
    """The unit of search: an id and a text that begins with its title, if it has one."""

    passage_id: str
    contents: str


def iter_row_passages(row: Mapping[str, Any], number: int, settings: IndexSettings, *, where: str) -> Iterator[Passage]:
    """The passage of a row, or its chunks; `number` is the id of a row without one."""
    given_id = row.get(settings.id_field)
    passage_id = str(number) if given_id is None else str(given_id)
    title, text = _read_texts(row, settings, where=where)
    if settings.chunk_words is None:
        yield Passage(passage_id, f"{title}\n{text}" if title else text)
        return
    words = text.split()
    starts = range(0, max(len(words), 1), settings.chunk_words)
    for index, start in enumerate(starts):
        chunk = " ".join(words[start : start + settings.chunk_words])
        yield Passage(f"{passage_id}#{index}", f"{title}\n{chunk}" if title else chunk)


def _read_texts(row: Mapping[str, Any], settings: IndexSettings, *, where: str) -> tuple[str, str]:
    """Title (may be empty) and text of a row."""
    if settings.text_field is not None:
        field = settings.text_field
    else:
        field = "contents" if isinstance(row.get("contents"), str) else "text"
    text = row.get(field)
    if not isinstance(text, str):
        wanted = f"{field!r}" if settings.text_field is not None else "'contents' or 'text'"
        raise DataError(
            f"{where} has no text in {wanted}; its fields are {', '.join(map(str, row)) or 'none'}. Set text_field"
        )
    title = row.get("title")
    return (title if isinstance(title, str) and field != "contents" else ""), text


TEXT_SUFFIXES = {".txt", ".md", ".rst"}
LINES_SUFFIXES = {".jsonl", ".json"}
TABLE_SUFFIXES = {*LINES_SUFFIXES, ".parquet", ".arrow", ".csv"}
"""Files of a data set as the hub stores it."""


def iter_passages(
    source: str | Path, settings: IndexSettings, *, name: str | None = None, split: str | None = None
) -> Iterator[Passage]:
    """Passages of a JSON Lines file, a folder of text files, a data set in a folder (of `save_to_disk`, or with the
    files of a hub repository), or a hub id.

    Raises:
        DataError: the source does not exist, has another form, or a row has no text.
    """
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix.lower() not in LINES_SUFFIXES:
            raise DataError(
                f"{path} is not a .jsonl file; give one, a folder of text files, or a Hugging Face data set"
            )
        _refuse_parts(path, name=name, split=split)
        return _iter_lines(path, settings)
    if path.is_dir():
        if is_saved(path):
            return _iter_data_set(str(path), settings, name=name, split=split)
        paths = sorted(each for each in path.rglob("*") if each.is_file())
        if any(each.suffix.lower() in TABLE_SUFFIXES for each in paths) and not _find_texts(paths, but="README.md"):
            return _iter_data_set(str(path), settings, name=name, split=split)
        _refuse_parts(path, name=name, split=split)
        return _iter_folder(path, paths, settings)
    check_data_path(str(source), knob="corpus")
    return _iter_data_set(str(source), settings, name=name, split=split)


def _refuse_parts(path: Path, *, name: str | None, split: str | None) -> None:
    for knob, value in (("name", name), ("split", split)):
        if value is not None:
            raise DataError(f"{knob}={value!r} has no effect: {path} is not a Hugging Face data set; leave out {knob}")


def _iter_lines(path: Path, settings: IndexSettings) -> Iterator[Passage]:
    for number, row in iter_jsonl(path):
        yield from iter_row_passages(row, number - 1, settings, where=f"line {number} of {path}")


def _find_texts(paths: list[Path], *, but: str | None = None) -> list[Path]:
    return [path for path in paths if path.suffix.lower() in TEXT_SUFFIXES and path.name != but]


def _iter_folder(folder: Path, files: list[Path], settings: IndexSettings) -> Iterator[Passage]:
    """Text files below a folder in the order of their paths; the path is the id, the file name the title."""
    paths = _find_texts(files)
    if not paths:
        raise DataError(f"the folder {folder} has no files that end in {', '.join(sorted(TEXT_SUFFIXES))}")
    for number, path in enumerate(paths):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8: {error}") from error
        row = {settings.id_field: path.relative_to(folder).as_posix(), "title": path.stem, "text": text}
        if settings.text_field is not None:
            row[settings.text_field] = text
        yield from iter_row_passages(row, number, settings, where=str(path))


def _iter_data_set(path: str, settings: IndexSettings, *, name: str | None, split: str | None) -> Iterator[Passage]:
    from tunesmith.tasks.load_library import iter_library_rows  # slow to import, and not needed for files

    rows = iter_library_rows(path, name=name, split=split or "train", is_streamed=True)
    for number, row in enumerate(rows):
        yield from iter_row_passages(row, number, settings, where=f"row {number} of {path!r}")
