"""Passages on disk: one JSON line each, in the form in which the server sends it, found by position without parsing.

`passages.jsonl` holds `{"id", "contents"}` lines, `offsets.npy` the byte at which each begins and the size of the file,
`id_rank.npy` the rank of each passage's id among all ids, by which ties of equal scores are broken.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from tunesmith.errors import DataError
from tunesmith.retrieval.corpus import Passage

LINES, OFFSETS, RANKS = "passages.jsonl", "offsets.npy", "id_rank.npy"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusInfo:
    """What was written: the number of passages, their bytes, and the SHA-256 of `passages.jsonl`."""

    num_passages: int
    num_bytes: int
    sha256: str


def write_passages(folder: Path, passages: Iterable[Passage]) -> CorpusInfo:
    """Write all passages of a corpus; refuses a corpus without passages or with an id twice."""
    digest = hashlib.sha256()
    offsets, ids = [0], []
    with (folder / LINES).open("wb") as file:
        for passage in passages:
            text = json.dumps({"id": passage.passage_id, "contents": passage.contents}, ensure_ascii=False)
            line = text.encode(errors="backslashreplace") + b"\n"
            digest.update(line)
            file.write(line)
            offsets.append(offsets[-1] + len(line))
            ids.append(passage.passage_id)
    if not ids:
        raise DataError("the corpus has no passages")
    order = sorted(range(len(ids)), key=ids.__getitem__)
    for first, second in pairwise(order):
        if ids[first] == ids[second]:
            raise DataError(
                f"passages {first} and {second} have the same id {ids[first]!r}; ids must differ. Set id_field"
            )
    ranks = np.empty(len(ids), dtype=np.int32)
    ranks[order] = np.arange(len(ids), dtype=np.int32)
    np.save(folder / RANKS, ranks)
    np.save(folder / OFFSETS, np.asarray(offsets, dtype=np.int64))
    return CorpusInfo(num_passages=len(ids), num_bytes=offsets[-1], sha256=digest.hexdigest())


class PassageStore:
    """Reads passages by position; the file is memory-mapped, so opening is immediate and memory is shared."""

    def __init__(self, folder: Path) -> None:
        self._offsets = np.asarray(np.load(folder / OFFSETS, mmap_mode="r"))
        self.id_ranks = np.asarray(np.load(folder / RANKS, mmap_mode="r"))
        with (folder / LINES).open("rb") as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self.id_ranks)

    def read_line(self, position: int) -> bytes:
        """The JSON object of a passage, `{"id": ..., "contents": ...}`."""
        start, end = self._offsets[position : position + 2].tolist()
        return self._lines[start : end - 1]

    def read_passage(self, position: int) -> Passage:
        row = json.loads(self.read_line(position))
        return Passage(row["id"], row["contents"])

    def iter_contents(self) -> Iterator[str]:
        """The texts of all passages in the order of the corpus."""
        return (self.read_passage(position).contents for position in range(len(self)))
