"""Builds an index folder: passages first, then the ranking structures, the manifest last, and one rename at the end."""

from __future__ import annotations

from pathlib import Path

from tunesmith.errors import StorageError
from tunesmith.retrieval.corpus import iter_passages
from tunesmith.retrieval.index.bm25 import write_bm25
from tunesmith.retrieval.index.dense import write_dense
from tunesmith.retrieval.index.manifest import IndexInfo, describe_index, write_manifest
from tunesmith.retrieval.index.passage_store import PassageStore, write_passages
from tunesmith.retrieval.settings import IndexSettings
from tunesmith.storage import locked_beside, renamed_folder

BM25_FOLDER, DENSE_FOLDER = "bm25", "dense"


def build_index(
    source: str | Path,
    out: str | Path,
    settings: IndexSettings | None = None,
    *,
    name: str | None = None,
    split: str | None = None,
) -> IndexInfo:
    """Build a search index.

    Args:
        source: a JSON Lines file of `{"id", "contents"}` or `{"id", "title", "text"}`, a folder of text files, a data
            set in a folder (of `save_to_disk`, or a hub repository), or its hub id; `name` and `split` are its
            configuration and split.
        out: a new folder. It appears when the index is complete.
        settings: kind of index and its knobs; BM25 by default.

    Raises:
        DataError: the corpus cannot be read, is empty, or has an id twice.
        StorageError: `out` exists or cannot be written.
    """
    settings = settings or IndexSettings()
    folder = Path(out).expanduser()
    if folder.exists():
        raise StorageError(f"{folder} exists; choose another folder for the index, or remove this one")
    passages = iter_passages(source, settings, name=name, split=split)
    with locked_beside(folder), renamed_folder(folder) as temporary:
        corpus = write_passages(temporary, passages)
        store = PassageStore(temporary)
        if settings.has_bm25:
            write_bm25(temporary / BM25_FOLDER, store.iter_contents(), settings)
        if settings.has_dense:
            write_dense(temporary / DENSE_FOLDER, store.iter_contents(), len(store), settings)
        info = describe_index(corpus, settings, source=str(source))
        write_manifest(temporary, info)
    return info
