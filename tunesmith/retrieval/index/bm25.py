"""BM25: scores are computed and stored by bm25s when the index is built; a search adds up those of its words.

bm25s stores, for each word, the passages that contain it and what the word adds to the score of each. A search adds
these up for all passages, as bm25s does, and ranks the best, with ties by id; the order of ties of bm25s is arbitrary.
The sum of bm25s takes about as long, but it is compiled again for each index that is opened, and keeps other threads,
such as the server's event loop, from running meanwhile (`benchmarks/tools/search_cpu.py`,
`results/tools/search_cpu.json`). `add_up` is the same loop, compiled once on a machine and without the GIL. Where numba
is missing, bm25s adds up.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tunesmith.errors import DataError
from tunesmith.retrieval.index.bm25s_import import import_bm25s
from tunesmith.retrieval.index.ranking import Ranking, rank
from tunesmith.retrieval.index.words import WordSplitter
from tunesmith.retrieval.settings import IndexSettings

try:
    import numba
except ImportError:
    numba = None

BLOCKS = 64
"""Parts into which the search for a threshold divides the passages."""


def write_bm25(folder: Path, texts: Iterable[str], settings: IndexSettings) -> None:
    """Index the texts into a new folder."""
    bm25s = import_bm25s()
    splitter = WordSplitter(stemmer=settings.stemmer, stopwords=settings.stopwords)
    vocabulary: dict[str, int] = {}
    rows = splitter.collect_ids(texts, vocabulary)
    if not vocabulary:
        raise DataError("no passage has a word that BM25 could index; set stopwords or stemmer to none")
    model = bm25s.BM25(k1=settings.bm25_k1, b=settings.bm25_b, method="lucene", csc_backend="numpy", backend="numpy")
    model.index((rows, vocabulary), create_empty_token=False, show_progress=False)
    model.save(folder, show_progress=False)


class Bm25Index:
    """Searches the folder of `write_bm25`. One object serves any number of threads."""

    def __init__(self, folder: Path, settings: IndexSettings, id_ranks: NDArray[np.int32]) -> None:
        self._model = import_bm25s().BM25.load(folder, mmap=True, show_progress=False)
        # views as plain arrays: indexing np.memmap objects is slower
        self._positions = np.asarray(self._model.scores["indices"])
        self._gains = np.asarray(self._model.scores["data"])
        self._starts = np.asarray(self._model.scores["indptr"])
        self._splitter = WordSplitter(stemmer=settings.stemmer, stopwords=settings.stopwords)
        self._id_ranks = id_ranks
        self._add_up([])  # compiles before the first search

    def find(self, query: str, top_n: int) -> Ranking:
        """The best passages that share a word with the query."""
        ids = self._model.vocab_dict
        scores = self._add_up(sorted(ids[word] for word in self._splitter.split(query) if word in ids))
        threshold = find_threshold(scores, top_n)
        found = np.flatnonzero(scores >= threshold if threshold > 0 else scores)
        return rank(found, scores[found], top_n, self._id_ranks)

    def _add_up(self, word_ids: list[int]) -> NDArray[np.float32]:
        """The scores of all passages."""
        scores: NDArray[np.float32]
        if numba is None:
            scores = self._model.get_scores_from_ids(word_ids)
        else:
            ids = np.array(word_ids, dtype=np.int64)
            scores = add_up(self._positions, self._gains, self._starts, ids, len(self._id_ranks))
        return scores


def find_threshold(scores: NDArray[np.float32], top_n: int) -> float:
    """A score that at least `top_n` passages reach; 0 if there may be fewer with a score."""
    whole = len(scores) // BLOCKS
    if whole < top_n:
        return 0.0
    largest = scores[: whole * BLOCKS].reshape(BLOCKS, whole).max(axis=0)  # of disjoint sets of passages
    return float(np.partition(largest, whole - top_n)[whole - top_n])


def add_up(
    positions: NDArray[np.int32],
    gains: NDArray[np.float32],
    starts: NDArray[np.integer],
    word_ids: NDArray[np.int64],
    num_passages: int,
) -> NDArray[np.float32]:
    """Scores [num_passages]: of each word w, `gains[i]` to `positions[i]` for i from `starts[w]` to `starts[w + 1]`."""
    scores = np.zeros(num_passages, dtype=np.float32)
    for word_id in word_ids:
        for place in range(starts[word_id], starts[word_id + 1]):
            scores[positions[place]] += gains[place]
    return scores


if numba is not None:
    add_up = numba.njit(cache=True, nogil=True)(add_up)
