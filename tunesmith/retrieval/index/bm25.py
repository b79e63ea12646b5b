"""BM25: scores are computed and stored by bm25s when the index is built; a search adds up those of its words.

bm25s stores, for each word, the passages that contain it and what the word adds to the score of each. A search adds
these up for all passages by bm25s, and ranks the best here, with ties by id: the order of ties of bm25s is arbitrary.
The sums are those of NumPy: bm25s' numba would be compiled again for each index that is opened.

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
        self._model.scores |= {name: np.asarray(self._model.scores[name]) for name in ("indices", "data", "indptr")}
        self._splitter = WordSplitter(stemmer=settings.stemmer, stopwords=settings.stopwords)
        self._id_ranks = id_ranks

    def find(self, query: str, top_n: int) -> Ranking:
        """The best passages that share a word with the query."""
        ids = self._model.vocab_dict
        words = self._splitter.split(query)
        scores = self._model.get_scores_from_ids(sorted(ids[word] for word in words if word in ids))
        threshold = find_threshold(scores, top_n)
        found = np.flatnonzero(scores >= threshold if threshold > 0 else scores)
        return rank(found, scores[found], top_n, self._id_ranks)


def find_threshold(scores: NDArray[np.float32], top_n: int) -> float:
    """A score that at least `top_n` passages reach; 0 if there may be fewer with a score."""
    whole = len(scores) // BLOCKS
    if whole < top_n:
        return 0.0
    largest = scores[: whole * BLOCKS].reshape(BLOCKS, whole).max(axis=0)  # of disjoint sets of passages
    return float(np.partition(largest, whole - top_n)[whole - top_n])


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
