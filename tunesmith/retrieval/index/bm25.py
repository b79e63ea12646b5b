"""BM25: scores are computed and stored by bm25s when the index is built; a search reads them memory-mapped.

bm25s stores, for each word, the passages that contain it and the score that the word adds to each: the score matrix by
columns. bm25s adds the columns of a query into one array over all passages and selects from it. `find` returns the same
ranking and reads less. Words are processed from the largest possible score to the smallest; once no passage without one
of the words so far can enter the ranking, the remaining columns are only looked up for the candidates (MaxScore, Turtle
and Flood 1995). `bm25_kernel` does the same in compiled code, for corpora where this matters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tunesmith.errors import DataError
from tunesmith.retrieval.index.bm25_kernel import IS_COMPILED, Scratch, add_up_words
from tunesmith.retrieval.index.bm25s_import import import_bm25s
from tunesmith.retrieval.index.ranking import Ranking, rank
from tunesmith.retrieval.index.words import WordSplitter
from tunesmith.retrieval.settings import IndexSettings

MAX_SCORES = "max_scores.npy"
DENSE_SHARE = 64
"""Sums are kept in an array over all passages once more than 1 / DENSE_SHARE of these have one."""
SMALL_CORPUS = 20_000
"""Passages up to which adding everything up is faster than finding out what can be left out."""
LOOK_UP_COST = 4
"""Passages of a word that are added up in the time of one look-up."""
BLOCK = 64
"""Passages of which only the largest sum takes part in the search for a threshold."""
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
    bm25s = import_bm25s()
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
        model = import_bm25s().BM25.load(folder, mmap=True, show_progress=False)
        # views as plain arrays: indexing np.memmap objects is slower
        self._gains = np.asarray(model.scores["data"])
        self._positions = np.asarray(model.scores["indices"])
        self._starts = np.asarray(model.scores["indptr"])
        self._max_gains = np.load(folder / MAX_SCORES)
        self._vocabulary: dict[str, int] = model.vocab_dict
        self._splitter = WordSplitter(stemmer=settings.stemmer, stopwords=settings.stopwords)
        self._id_ranks = id_ranks
        self._scratch = Scratch(len(id_ranks)) if IS_COMPILED and len(id_ranks) > SMALL_CORPUS else None
        if self._scratch is not None:
            self._add_up_compiled([], 1, self._scratch)  # compiles before the first search

    def find(self, query: str, top_n: int) -> Ranking:
        """The best passages that share a word with the query."""
        counts = Counter(self._splitter.split(query))
        words = sorted((self._vocabulary[word], count) for word, count in counts.items() if word in self._vocabulary)
        if self._scratch is None:
            found = add_up([self._read_postings(*word) for word in words], top_n, len(self._id_ranks))
        else:
            found = self._add_up_compiled(words, top_n, self._scratch)
        return rank(*found, top_n, self._id_ranks)

    def _read_postings(self, word_id: int, count: int) -> Postings:
        start, end = self._starts[word_id : word_id + 2].tolist()
        gains = self._gains[start:end]
        return Postings(
            positions=self._positions[start:end],
            gains=gains if count == 1 else gains * np.float32(count),
            max_gain=float(self._max_gains[word_id]) * count,
        )

    def _add_up_compiled(
        self, words: list[tuple[int, int]], top_n: int, scratch: Scratch
    ) -> tuple[NDArray[np.integer], NDArray[np.float32]]:
        """`add_up` of the postings of pairs of a word id and how often the query has it."""
        ids = np.array([word_id for word_id, _ in words], dtype=np.int64)
        counts = np.array([count for _, count in words], dtype=np.float32)
        max_gains = self._max_gains[ids] * counts.astype(np.float64)
        order = np.argsort(-max_gains, kind="stable")
        ids = ids[order]
        return add_up_words(
            self._positions,
            self._gains,
            np.stack([self._starts[ids], self._starts[ids + 1]], axis=1).astype(np.int64),
            counts[order],
            compute_bounds(max_gains[order]),
            min(top_n, len(self._id_ranks)),
            scratch.totals,
        )


def add_up(postings: list[Postings], top_n: int, num_passages: int) -> tuple[NDArray[np.integer], NDArray[np.float32]]:
    """Candidates, among them the `top_n` best and all that tie with the last of these, with their full scores."""
    if num_passages <= SMALL_CORPUS:
        return _add_up_all(postings, num_passages)
    ordered = sorted(postings, key=lambda each: -each.max_gain)
    bounds = compute_bounds(np.array([each.max_gain for each in ordered]))
    totals = _Totals(num_passages)
    for number, (each, bound) in enumerate(zip(ordered, bounds, strict=False)):
        threshold = totals.find_threshold(top_n)
        # a word with few passages, or that many candidates have to be looked up for, is added up faster
        if threshold > bound and totals.count(threshold - bound) * LOOK_UP_COST < len(each.positions):
            candidates, scores = totals.extract(threshold - bound)
            return _finish(candidates, scores, ordered[number:], bounds[number:], top_n)
        totals.add(each)
    return totals.extract(totals.find_threshold(top_n))


def compute_bounds(max_gains: NDArray[np.float64]) -> NDArray[np.float64]:
    """bounds[i] limits what word i and the later ones can add to a score."""
    return np.cumsum(max_gains[::-1])[::-1] * (1 + ROUNDING)


def _add_up_all(postings: list[Postings], num_passages: int) -> tuple[NDArray[np.integer], NDArray[np.float32]]:
    """All passages with a word, and their scores."""
    if not postings:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
    positions = np.concatenate([each.positions for each in postings])
    gains = np.concatenate([each.gains for each in postings])
    totals = np.bincount(positions, weights=gains, minlength=num_passages)
    found = np.flatnonzero(totals)
    return found, totals[found].astype(np.float32)


def _finish(
    candidates: NDArray[np.integer],
    scores: NDArray[np.float32],
    postings: list[Postings],
    bounds: NDArray[np.float64],
    top_n: int,
) -> tuple[NDArray[np.integer], NDArray[np.float32]]:
    """Look up the remaining words for the candidates, and drop those that can no longer be among the best."""
    for each, bound in zip(postings, bounds, strict=False):
        kept = scores + bound >= _find_nth_largest(scores, top_n)
        candidates, scores = candidates[kept], scores[kept]
        _look_up(candidates, scores, each)
    return candidates, scores


class _Totals:
    """Sums of scores: by passage in ascending order while they are few, then in an array over all passages."""

    def __init__(self, num_passages: int) -> None:
        self._num_passages = num_passages
        self._candidates: NDArray[np.integer] = np.empty(0, dtype=np.int32)
        self._scores = np.empty(0, dtype=np.float32)
        self._array: NDArray[np.float32] | None = None

    def add(self, word: Postings) -> None:
        """Add the scores of a word to all passages that contain it."""
        if self._array is None and (len(self._candidates) + len(word.positions)) * DENSE_SHARE > self._num_passages:
            self._array = np.zeros(-(-self._num_passages // BLOCK) * BLOCK, dtype=np.float32)
            self._array[self._candidates] = self._scores
        if self._array is not None:
            self._array[word.positions] += word.gains
            return
        union = np.union1d(self._candidates, word.positions)
        totals = np.zeros(len(union), dtype=np.float32)
        totals[np.searchsorted(union, self._candidates)] = self._scores
        totals[np.searchsorted(union, word.positions)] += word.gains
        self._candidates, self._scores = union, totals

    def find_threshold(self, top_n: int) -> float:
        """A score that at least `top_n` passages reach; 0 if there are fewer passages with a score."""
        if self._array is None:
            return _find_nth_largest(self._scores, top_n)
        largest = self._array.reshape(BLOCK, -1).max(axis=0)  # of disjoint sets of passages
        return _find_nth_largest(largest if len(largest) >= top_n else self._array, top_n)

    def count(self, threshold: float) -> int:
        """How many passages reach the threshold."""
        return int(np.count_nonzero((self._scores if self._array is None else self._array) >= threshold))

    def extract(self, threshold: float) -> tuple[NDArray[np.integer], NDArray[np.float32]]:
        """The passages that reach the threshold, and their sums."""
        if self._array is None:
            kept = self._scores >= threshold
            return self._candidates[kept], self._scores[kept]
        found = np.flatnonzero(self._array >= threshold if threshold > 0 else self._array > 0)
        return found, self._array[found]


def _find_nth_largest(scores: NDArray[np.float32], number: int) -> float:
    """The `number`-th largest score, 0 if there are fewer."""
    if len(scores) < number:
        return 0.0
    return float(np.partition(scores, len(scores) - number)[len(scores) - number])


def _look_up(candidates: NDArray[np.integer], scores: NDArray[np.float32], word: Postings) -> None:
    """Add what a word gives to the candidates that contain it, in place."""
    places = np.searchsorted(word.positions, candidates)
    places[places == len(word.positions)] = 0
    found = word.positions[places] == candidates
    scores[found] += word.gains[places[found]]
