"""A passage, and how it is made of a row of data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tunesmith.errors import DataError
from tunesmith.retrieval.settings import IndexSettings


@dataclass(frozen=True, slots=True)
class Passage:
    """The unit of search: an id and a text, which begins with its title if it has one."""

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
