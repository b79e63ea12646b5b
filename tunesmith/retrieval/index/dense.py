"""Dense search: embeddings by sentence-transformers, nearest neighbors by faiss, scores are inner products.

Embeddings have length 1. The rounding of a forward depends on the batch, so scores are rounded to five decimals before
they are ranked, and near ties go by id. faiss and sentence-transformers are optional and imported here only.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.errors import ConfigError, ModelError
from tunesmith.hub import offline_if_unreachable
from tunesmith.retrieval.index.ranking import Ranking, rank
from tunesmith.retrieval.settings import IndexSettings

FILE = "vectors.faiss"
EMBEDDINGS = "embeddings.npy"
CHUNK = 4096
"""Passages that are embedded before their vectors are written."""
SCORE_DECIMALS = 5
E5_PREFIXES = ("query: ", "passage: ")
BGE_PREFIXES = ("Represent this sentence for searching relevant passages: ", "")


class Embedder:
    """An embedding model with the prefixes that it was trained with. One object serves any number of threads."""

    def __init__(self, settings: IndexSettings, *, device: str | None) -> None:
        assert settings.model is not None
        package = _import("sentence_transformers")
        try:
            with offline_if_unreachable(settings.model):
                self._model = package.SentenceTransformer(settings.model, device=device)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot load the embedding model {settings.model!r}: {error}") from error
        self._settings = settings
        self._query_prefix, self._passage_prefix = choose_prefixes(settings)
        self._limit = self._model.max_seq_length or 10**9
        self._lock = threading.Lock()  # the limit on tokens is an attribute of the model

    def embed(self, texts: Sequence[str], *, are_queries: bool) -> NDArray[np.float32]:
        """Embeddings [N, D] of length 1, of queries or of passages."""
        settings = self._settings
        prefix = self._query_prefix if are_queries else self._passage_prefix
        max_tokens = settings.max_query_tokens if are_queries else settings.max_passage_tokens
        with self._lock:
            self._model.max_seq_length = min(max_tokens, self._limit)
            vectors = self._model.encode(
                [prefix + text for text in texts],
                batch_size=settings.batch_size,
                normalize_embeddings=True,
                convert_to_numpy=True,
                show_progress_bar=False,
            )
        return np.ascontiguousarray(vectors, dtype=np.float32)


def choose_prefixes(settings: IndexSettings) -> tuple[str, str]:
    """Texts before queries and before passages: the settings, else what the family in the model's name calls for."""
    name = Path(settings.model or "").name.lower()
    # bge-m3 takes no instruction
    defaults = E5_PREFIXES if "e5" in name else BGE_PREFIXES if "bge" in name and "m3" not in name else ("", "")
    given = (settings.query_prefix, settings.passage_prefix)
    query, passage = (default if value is None else value for value, default in zip(given, defaults, strict=True))
    return query, passage


def write_dense(folder: Path, texts: Iterable[str], num_texts: int, settings: IndexSettings) -> None:
    """Embed the texts and write a faiss index into a new folder; vectors wait on disk, not in memory."""
    faiss = _import("faiss")
    embedder = Embedder(settings, device=settings.device)
    num_dimensions = embedder.embed(["a"], are_queries=False).shape[1]
    try:
        index = faiss.index_factory(num_dimensions, settings.faiss, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ConfigError(f"faiss={settings.faiss!r} is not a factory string: {str(error).splitlines()[-1]}") from error
    folder.mkdir(parents=True)
    path = folder / EMBEDDINGS
    vectors = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(num_texts, num_dimensions))
    start, left = 0, iter(texts)
    while chunk := list(islice(left, CHUNK)):
        vectors[start : start + len(chunk)] = embedder.embed(chunk, are_queries=False)
        start += len(chunk)
    if not index.is_trained:
        _train(index, vectors, settings)
    for start in range(0, num_texts, CHUNK):
        index.add(np.ascontiguousarray(vectors[start : start + CHUNK]))
    faiss.write_index(index, str(folder / FILE))
    path.unlink()


def _train(index: Any, vectors: NDArray[np.float32], settings: IndexSettings) -> None:
    """Train on a sample of the vectors [N, D] that depends only on N."""
    num_drawn = min(settings.train_size, len(vectors))
    drawn = np.random.default_rng(0).choice(len(vectors), num_drawn, replace=False)
    try:
        index.train(np.ascontiguousarray(vectors[np.sort(drawn)]))
    except RuntimeError as error:
        raise ConfigError(
            f"faiss={settings.faiss!r} cannot be trained on {num_drawn} passages ({str(error).splitlines()[-1]}); "
            "use fewer lists, or Flat"
        ) from error


class DenseIndex:
    """Searches the folder of `write_dense`. One object serves any number of threads."""

    def __init__(
        self, folder: Path, settings: IndexSettings, id_ranks: NDArray[np.int32], *, device: str | None
    ) -> None:
        faiss = _import("faiss")
        self._index = faiss.read_index(str(folder / FILE))
        if hasattr(faiss.downcast_index(self._index), "nprobe"):
            faiss.downcast_index(self._index).nprobe = settings.nprobe
        self._embedder = Embedder(settings, device=device)
        self._id_ranks = id_ranks

    def find(self, queries: Sequence[str], top_n: int) -> list[Ranking]:
        """The `top_n` nearest passages of each query."""
        vectors = self._embedder.embed(queries, are_queries=True)
        scores, positions = self._index.search(vectors, min(top_n, len(self._id_ranks)))
        return [self._rank(*row, top_n) for row in zip(positions, scores, strict=True)]

    def _rank(self, positions: NDArray[np.int64], scores: NDArray[np.float32], top_n: int) -> Ranking:
        found = positions >= 0  # approximate indexes fill up with -1
        return rank(positions[found], np.round(scores[found], SCORE_DECIMALS), top_n, self._id_ranks)


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"dense search needs {name.replace('_', '-')} ({error}): pip install 'tunesmith[retrieval-dense]'"
        ) from error
