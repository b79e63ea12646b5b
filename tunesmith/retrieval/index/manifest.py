"""The manifest of an index folder: what it was built from and how. It is what makes a folder an index.

An index is built under a temporary name and renamed when its manifest is written, so a folder without a manifest, or
with files of another size than the manifest says, is refused.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tunesmith.errors import DataError, MissingDataError
from tunesmith.retrieval.index.passage_store import CorpusInfo
from tunesmith.retrieval.settings import IndexSettings
from tunesmith.storage import load_json, save_json
from tunesmith.version import __version__

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


def describe_index(corpus: CorpusInfo, settings: IndexSettings, *, source: str) -> IndexInfo:
    """The description of an index that is about to be finished."""
    # the device and the batch size do not change what is found
    ranking = settings.model_dump(exclude={"device", "batch_size"})
    hashed = json.dumps([FORMAT_VERSION, corpus.sha256, ranking], sort_keys=True)
    return IndexInfo(
        index_hash=hashlib.sha256(hashed.encode()).hexdigest()[:16],
        num_passages=corpus.num_passages,
        num_bytes=corpus.num_bytes,
        corpus_sha256=corpus.sha256,
        source=source,
        settings=settings,
        libraries=_list_versions(),
    )


def write_manifest(folder: Path, info: IndexInfo) -> None:
    """Describe the files of a finished index; written last."""
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()
    }
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
