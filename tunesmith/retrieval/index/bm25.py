"""BM25: scores are computed and stored by bm25s when the index is built; a search reads them memory-mapped.

bm25s stores, for each word, the passages that contain it and the score that the word adds to each (the score matrix by
columns). bm25s itself adds the columns of a query into one array over all passages and selects from it. `find` returns
the same ranking but reads less: words are processed from the largest possible score to the smallest, and once no passage
without one of the words so far can enter the ranking, the remaining columns are only looked up for the candidates
(MaxScore, Turtle and Flood 1995).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from tunesmith.errors import ConfigError, DataError
from tunesmith.retrieval.index.ranking import Ranking, rank
from tunesmith.retrieval.index.words import WordSplitter
from tunesmith.retrieval.settings import IndexSettings

MAX_SCORES = "max_scores.npy"
DENSE_SHARE = 64
"""Candidates are kept in an array over all passages once they are more than 1 / DENSE_SHARE of them."""
ROUNDING = 1e-5
"""Relative margin by which float32 sums may exceed the bound."""


@dataclass(frozen=True, slots=True)
class Postings:
    """The passages [N] that contain a word, ascending, what the word adds to the score of each [N], and the largest."""

    positions: NDArray[np.int32]
    gains: NDArray[np.float32]
    max_gain: float


def write_bm25(folder: Path, texts: Iterable[str], settings: IndexSettings) -> None:
    """Index the texts into a new folder."""
    bm25s = _import_bm25s()
    splitter = WordSplitter(stemmer=settings.stemmer, stopwords=settings.stopwords)
    vocabulary: dict[str, int] = {}
    rows = splitter.collect_ids(texts, vocabulary)
    if not vocabulary:
        raise DataError("no passage has a word that BM25 could index; set stopwords or stemmer to none")
    model = bm25s.BM25(k1=settings.bm25_k1, b=settings.bm25_b, method="lucene", csc_backend="numpy", backend="numpy")
    model.index((rows, vocabulary), create_empty_token=False, show_progress=False)
    model.save(folder, show_progress=False)
    starts = np.asarray(model.scores["indptr"][:-1])
    np.save(folder / MAX_SCORES, np.maximum.reduceat(model.scores["data"], starts))


class Bm25Index:
    """Searches the folder of `write_bm25`. One object serves any number of threads."""

    def __init__(self, folder: Path, settings: IndexSettings, id_ranks: NDArray[np.int32]) -> None:
        model = _import_bm25s().BM25.load(folder, mmap=True, show_progress=False)
        # views as plain arrays: indexing np.memmap objects is slower
        self._gains = np.asarray(model.scores["data"])
        self._positions = np.asarray(model.scores["indices"])
        self._starts = np.asarray(model.scores["indptr"])
        self._max_gains = np.load(folder / MAX_SCORES)
        self._vocabulary: dict[str, int] = model.vocab_dict
        self._splitter = WordSplitter(stemmer=settings.stemmer, stopwords=settings.stopwords)
        self._id_ranks = id_ranks

    def find(self, query: str, top_n: int) -> Ranking:
        """The best passages that share a word with the query."""
        postings = self._collect_postings(query)
        positions, scores = add_up(postings, top_n, len(self._id_ranks))
        return rank(positions, scores, top_n, self._id_ranks)

    def _collect_postings(self, query: str) -> list[Postings]:
        """Postings of the query's words; a word that is repeated counts as often."""
        counts = Counter(self._splitter.split(query))
        known = [(self._vocabulary[word], count) for word, count in counts.items() if word in self._vocabulary]
        return [self._read_postings(word_id, count) for word_id, count in sorted(known)]

    def _read_postings(self, word_id: int, count: int) -> Postings:
        start, end = self._starts[word_id : word_id + 2].tolist()
        gains = self._gains[start:end]
        return Postings(
            positions=self._positions[start:end],
            gains=gains if count == 1 else gains * np.float32(count),
            max_gain=float(self._max_gains[word_id]) * count,
        )


def add_up(postings: list[Postings], top_n: int, num_passages: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Candidates, among them the `top_n` best and all that tie with the last of these, with their full scores."""
    ordered = sorted(postings, key=lambda each: -each.max_gain)
    bounds = np.cumsum([0.0, *(each.max_gain for each in reversed(ordered))])[::-1] * (1 + ROUNDING)
    candidates = np.empty(0, dtype=np.int32)
    scores = np.empty(0, dtype=np.float32)
    threshold, is_closed = -1.0, False
    for each, bound in zip(ordered, bounds, strict=False):
        # `bound` limits what this word and the later ones can add
        if len(candidates) >= top_n and not is_closed:
            threshold = _find_threshold(scores, top_n)
            is_closed = threshold > bound
        if not is_closed:
            candidates, scores = _merge(candidates, scores, each, num_passages)
            continue
        kept = scores + bound >= threshold
        candidates, scores = candidates[kept], scores[kept]
        _look_up(candidates, scores, each)
        threshold = max(threshold, _find_threshold(scores, top_n))
    return candidates, scores


def _find_threshold(scores: NDArray[np.float32], top_n: int) -> float:
    """The score of the candidate at rank `top_n`."""
    return float(np.partition(scores, len(scores) - top_n)[len(scores) - top_n])


def _merge(
    candidates: NDArray[np.int32], scores: NDArray[np.float32], added: Postings, num_passages: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The union of candidates and the passages of a word, ascending, with the sums of their scores."""
    if not len(candidates):
        return added.positions, added.gains.astype(np.float32)
    if (len(candidates) + len(added.positions)) * DENSE_SHARE > num_passages:
        totals = np.zeros(num_passages, dtype=np.float32)
        totals[candidates] = scores
        totals[added.positions] += added.gains
        union = np.flatnonzero(totals).astype(np.int32)
        return union, totals[union]
    union = np.union1d(candidates, added.positions)
    totals = np.zeros(len(union), dtype=np.float32)
    totals[np.searchsorted(union, candidates)] = scores
    totals[np.searchsorted(union, added.positions)] += added.gains
    return union, totals


def _look_up(candidates: NDArray[np.int32], scores: NDArray[np.float32], word: Postings) -> None:
    """Add what a word gives to the candidates that contain it, in place."""
    places = np.searchsorted(word.positions, candidates)
    places[places == len(word.positions)] = 0
    found = word.positions[places] == candidates
    scores[found] += word.gains[places[found]]


def _import_bm25s() -> ModuleType:
    try:
        import bm25s
    except ImportError as error:
        raise ConfigError("BM25 needs bm25s: pip install 'tunesmith[retrieval]'") from error
    return bm25s
