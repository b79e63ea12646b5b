"""The index folder: its passages, and its manifest, which says what it was built from and how.

`passages.jsonl` holds one `{"id", "contents"}` line for each passage, in the form in which the server sends it, found
by position without parsing; `offsets.npy` the byte at which each begins and the size of the file; `id_rank.npy` the
rank of each passage's id among all ids, by which ties of equal scores are broken.

An index is built under a temporary name and renamed when its manifest is written, so a folder without a manifest, or
with files of another size than the manifest says, is refused.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.errors import DataError, MissingDataError
from tunesmith.retrieval.corpus import Passage
from tunesmith.retrieval.settings import IndexSettings
from tunesmith.storage import encode_json_line, list_files, load_json, save_json
from tunesmith.version import __version__

LINES, OFFSETS, RANKS = "passages.jsonl", "offsets.npy", "id_rank.npy"


def write_passages(folder: Path, passages: Iterable[Passage]) -> str:
    """Write all passages of a corpus; returns the SHA-256 of `passages.jsonl`. Refuses a corpus without passages or
    with an id twice."""
    digest = hashlib.sha256()
    offsets, ids = [0], []
    with (folder / LINES).open("wb") as file:
        for passage in passages:
            line = encode_json_line({"id": passage.passage_id, "contents": passage.contents})
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
    return digest.hexdigest()


class PassageStore:
    """Reads passages by position; the file is memory-mapped, so opening is immediate and memory is shared."""

    def __init__(self, folder: Path) -> None:
        self._offsets = np.asarray(np.load(folder / OFFSETS, mmap_mode="r"))
        self.id_ranks = np.asarray(np.load(folder / RANKS, mmap_mode="r"))
        with (folder / LINES).open("rb") as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self.id_ranks)

    @property
    def num_bytes(self) -> int:
        return len(self._lines)

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


FILE = "manifest.json"
FORMAT = "tunesmith-search-index"
FORMAT_VERSION = 1
LIBRARIES = ("bm25s", "PyStemmer", "faiss-cpu", "faiss-gpu", "sentence-transformers", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexInfo:
    """An index: its hash, its corpus and its settings.

    `index_hash` changes with the corpus, the settings, and the version of the format. It is part of the keys of caches.
    """

    index_hash: str
    num_passages: int
    num_bytes: int
    corpus_sha256: str
    source: str
    settings: IndexSettings
    libraries: dict[str, str] = field(default_factory=dict)


def describe_index(store: PassageStore, settings: IndexSettings, *, corpus_sha256: str, source: str) -> IndexInfo:
    """The description of an index that is about to be finished."""
    # the device and the batch size do not change what is found
    ranking = settings.model_dump(exclude={"device", "batch_size"})
    hashed = json.dumps([FORMAT_VERSION, corpus_sha256, ranking], sort_keys=True)
    return IndexInfo(
        index_hash=hashlib.sha256(hashed.encode()).hexdigest()[:16],
        num_passages=len(store),
        num_bytes=store.num_bytes,
        corpus_sha256=corpus_sha256,
        source=source,
        settings=settings,
        libraries=_list_versions(),
    )


def write_manifest(folder: Path, info: IndexInfo) -> None:
    """Describe the files of a finished index; written last."""
    files = {name: (folder / name).stat().st_size for name in list_files(folder)}
    values = asdict(info) | {"settings": info.settings.model_dump()}
    save_json(folder / FILE, {"format": FORMAT, "format_version": FORMAT_VERSION} | values | {"files": files})


def read_manifest(folder: Path) -> IndexInfo:
    """Check that a folder is a complete index of this version, and return its description."""
    if not folder.is_dir():
        raise MissingDataError(
            f"there is no index {str(folder)!r}; build it with: tunesmith search build CORPUS --out DIR"
        )
    path = folder / FILE
    if not path.exists():
        raise DataError(f"{folder} is not a complete search index: it has no {FILE}; build it again")
    values: dict[str, Any] = load_json(path)
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise DataError(f"{path} does not describe a search index")
    found = values.pop("format_version", None)
    if found != FORMAT_VERSION:
        raise DataError(
            f"{folder} has index format {found}, and this version of tunesmith ({__version__}) reads format "
            f"{FORMAT_VERSION}; build it again"
        )
    for name, size in values.pop("files").items():
        actual = (folder / name).stat().st_size if (folder / name).is_file() else None
        if actual != size:
            state = "is missing" if actual is None else f"has {actual} bytes instead of {size}"
            raise DataError(f"{folder} is not a complete search index: {name} {state}; build it again")
    return IndexInfo(**(values | {"settings": IndexSettings(**values["settings"])}))


def _list_versions() -> dict[str, str]:
    found = {"tunesmith": __version__}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
