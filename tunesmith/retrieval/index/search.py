"""`build_index` writes an index folder, `SearchIndex` searches it.

Passages are written first, then what ranks them, the manifest last; one rename at the end makes the folder an index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tunesmith.errors import StorageError
from tunesmith.retrieval.corpus import Passage, iter_passages
from tunesmith.retrieval.index.bm25 import Bm25Index, write_bm25
from tunesmith.retrieval.index.dense import DenseIndex, write_dense
from tunesmith.retrieval.index.folder import (
    IndexInfo,
    PassageStore,
    describe_index,
    read_manifest,
    write_manifest,
    write_passages,
)
from tunesmith.retrieval.index.ranking import Ranking, fuse
from tunesmith.retrieval.settings import MAX_TOP_N, IndexSettings
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
        corpus_sha256 = write_passages(temporary, passages)
        store = PassageStore(temporary)
        if settings.has_bm25:
            write_bm25(temporary / BM25_FOLDER, store.iter_contents(), settings)
        if settings.has_dense:
            write_dense(temporary / DENSE_FOLDER, store.iter_contents(), len(store), settings)
        info = describe_index(store, settings, corpus_sha256=corpus_sha256, source=str(source))
        write_manifest(temporary, info)
    return info


FUSION_DEPTH = 100
"""Passages of each ranking that a hybrid search fuses, at least."""


@dataclass(frozen=True, slots=True)
class Hit(Passage):
    """A passage that a search found."""

    score: float
    """The higher, the better."""


class SearchIndex:
    """An index folder, memory-mapped. One object serves any number of threads.

    A ranking is a function of the index and the query. Passages with equal scores are ordered by id. BM25 returns only
    passages that share a word with the query, so a ranking may be shorter than `top_n`.

    Raises:
        DataError: the folder is not a complete index of this version.
    """

    def __init__(self, folder: str | Path, *, device: str | None = None) -> None:
        path = Path(folder).expanduser()
        self.info: IndexInfo = read_manifest(path)
        settings = self.info.settings
        self.passages = PassageStore(path)
        ranks = self.passages.id_ranks
        self._bm25 = Bm25Index(path / BM25_FOLDER, settings, ranks) if settings.has_bm25 else None
        self._dense = DenseIndex(path / DENSE_FOLDER, settings, ranks, device=device) if settings.has_dense else None

    def search(self, query: str, top_n: int = 10) -> list[Hit]:
        """The best passages for a query, best first."""
        return self.search_batch([query], top_n)[0]

    def search_batch(self, queries: Sequence[str], top_n: int = 10) -> list[list[Hit]]:
        """The best passages for each query."""
        if not 1 <= top_n <= MAX_TOP_N:
            raise ValueError(f"top_n={top_n} is not between 1 and {MAX_TOP_N}")
        rankings = self.rank([(self.normalize(query), top_n) for query in queries])
        return [self.read_hits(ranking) for ranking in rankings]

    def normalize(self, query: str) -> str:
        """One text for all queries that have the same ranking: white space, and for BM25 the case of letters."""
        text = " ".join(query.split())
        return text.lower() if self._dense is None else text

    def rank(self, searches: Sequence[tuple[str, int]]) -> list[Ranking]:
        """Rankings for pairs of a normalized query and its top_n, in one batch."""
        if self._dense is None:
            assert self._bm25 is not None
            return [self._bm25.find(query, top_n) for query, top_n in searches]
        if not searches:
            return []
        depths = [top_n if self._bm25 is None else max(top_n, FUSION_DEPTH) for _, top_n in searches]
        nearest = self._dense.find([query for query, _ in searches], max(depths))
        return [
            self._combine(query, top_n, ranking, depth)
            for (query, top_n), ranking, depth in zip(searches, nearest, depths, strict=True)
        ]

    def read_hits(self, ranking: Ranking) -> list[Hit]:
        pairs = zip(ranking.positions.tolist(), ranking.scores.tolist(), strict=True)
        found = [(self.passages.read_passage(position), score) for position, score in pairs]
        return [Hit(each.passage_id, each.contents, score) for each, score in found]

    def _combine(self, query: str, top_n: int, nearest: Ranking, depth: int) -> Ranking:
        """The dense ranking, cut, or fused with that of BM25."""
        nearest = Ranking(nearest.positions[:depth], nearest.scores[:depth])
        if self._bm25 is None:
            return nearest
        return fuse([self._bm25.find(query, depth), nearest], top_n, self.passages.id_ranks)


def open_index(path: str | Path) -> SearchIndex:
    """Open an index folder; the passages of a JSON Lines file are indexed by BM25 for this process.

    Raises:
        ConfigError: the passages are to be indexed, and bm25s is not installed.
        DataError: the folder is not a complete index, or the file holds something else than passages.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        return SearchIndex(path)
    with TemporaryDirectory(prefix="tunesmith-index-") as folder:
        build_index(path, Path(folder) / "index")
        return SearchIndex(Path(folder) / "index")  # mapped files stay readable after their folder is removed
