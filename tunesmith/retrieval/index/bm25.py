"""BM25: scores are computed and stored by bm25s when the index is built; a search adds up those of its words.

bm25s stores, for each word, the passages that contain it and what the word adds to the score of each. A search adds
these up for all passages, as bm25s does, and ranks the best, with ties by id; the order of ties of bm25s is arbitrary.
The sum of bm25s takes about as long, but it is compiled again for each index that is opened, and keeps other threads,
such as the server's event loop, from running meanwhile (`benchmarks/tools/search_cpu.py`,
`results/tools/search_cpu.json`). `add_up` is the same loop, compiled once on a machine and without the GIL. Where numba
is missing, bm25s adds up.

The words of passages and of queries are split in the same way: lower case, without stop words, stemmed.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from tunesmith.errors import ConfigError, DataError
from tunesmith.retrieval.index.ranking import Ranking, rank
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


WORD = re.compile(r"\w+")


class WordSplitter:
    """Splits texts into stems; a stem is computed once per distinct word while an index is built.

    Raises:
        ConfigError: there is no such stemmer, or bm25s or PyStemmer is not installed.
    """

    def __init__(self, *, stemmer: str, stopwords: str) -> None:
        self._stem = _build_stemmer(stemmer)
        self._stopwords = frozenset(import_bm25s().stopwords.STOPWORDS_EN if stopwords == "english" else ())

    def split(self, text: str) -> list[str]:
        """Stems of the words in their order, repeated words included."""
        return [self._stem(word) for word in WORD.findall(text.lower()) if word not in self._stopwords]

    def collect_ids(self, texts: Iterable[str], vocabulary: dict[str, int]) -> list[list[int]]:
        """Ids of the stems of each text; new stems are added to `vocabulary`."""
        id_of_word: dict[str, int] = {}
        rows = []
        for text in texts:
            row = []
            for word in WORD.findall(text.lower()):
                known = id_of_word.get(word)
                if known is None:
                    known = -1 if word in self._stopwords else vocabulary.setdefault(self._stem(word), len(vocabulary))
                    id_of_word[word] = known
                if known >= 0:
                    row.append(known)
            rows.append(row)
        return rows


def _build_stemmer(name: str) -> Callable[[str], str]:
    if name == "none":
        return str
    try:
        import Stemmer
    except ImportError as error:
        raise ConfigError("BM25 with a stemmer needs PyStemmer: pip install 'tunesmith[retrieval]'") from error
    try:
        stem: Callable[[str], str] = Stemmer.Stemmer(name).stemWord
    except KeyError as error:
        known = ", ".join(["none", *Stemmer.algorithms()])
        raise ConfigError(f"stemmer={name!r} is not one of {known}") from error
    return stem


JAX = ("jax", "jax.lax")


def import_bm25s() -> ModuleType:
    """The package bm25s, its stop words loaded.

    Raises:
        ConfigError: bm25s is not installed.
    """
    try:
        with hidden_modules(JAX):
            importlib.import_module("bm25s.stopwords")
            return importlib.import_module("bm25s")
    except ImportError as error:
        raise ConfigError("BM25 needs bm25s: pip install 'tunesmith[retrieval]'") from error


@contextmanager
def hidden_modules(names: tuple[str, ...]) -> Iterator[None]:
    """Within, imports of these modules fail; modules that are loaded already stay loaded."""
    loaded = {name: sys.modules.get(name) for name in names}
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type] # None makes an import raise ImportError
    try:
        yield
    finally:
        for name, module in loaded.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
