"""How much the trajectories of one question, and all trajectories, differ from each other.

Tool patterns, spreads of correctness and tool calls, and the spread of the texts: the mean cosine distance of pairs.
Texts are vectors of a sentence-transformers model (`embedding_spread`), or counts of word pairs (`lexical_spread`);
each has its own name, because their values cannot be compared. Axes: N texts, D dimensions.
"""

from __future__ import annotations

import importlib.util
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.environments.transcript import Transcript
from tunesmith.errors import ConfigError

Floats = NDArray[np.float64]
WORD = re.compile(r"\w+|[^\w\s]")
NUM_BUCKETS = 4096
"""Dimensions that word pairs are hashed to."""
BATCH_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRow:
    """A trajectory of a question with its score; `row` has the other fields of its line."""

    question_id: Any
    transcript: Transcript
    correctness: float
    row: Mapping[str, Any]

    @property
    def pattern(self) -> tuple[str, ...]:
        """Names of the tools that were called, in order."""
        return tuple(each.tool for each in self.transcript.calls)


def measure_diversity(rows: Sequence[TrajectoryRow], *, embedding_model: str | None = None) -> dict[str, float | None]:
    """Measures by name; None if no question has two trajectories, or there are fewer than two in all."""
    by_question: defaultdict[Any, list[TrajectoryRow]] = defaultdict(list)
    for row in rows:
        by_question[row.question_id].append(row)
    groups = list(by_question.values())
    pairs = [group for group in groups if len(group) > 1]
    name = "lexical_spread" if embedding_model is None else "embedding_spread"
    inside, overall = measure_text_spreads(
        [[row.transcript.text for row in group] for group in groups], embedding_model
    )
    return {
        "trajectories": float(len(rows)),
        "questions": float(len(groups)),
        "trajectories_per_question": average([float(len(group)) for group in groups]),
        "tool_patterns_per_question": average([float(len({row.pattern for row in group})) for group in groups]),
        "tool_calls": average([float(len(row.pattern)) for row in rows]),
        "std_correctness_in_question": average([pstdev(row.correctness for row in group) for group in pairs]),
        "std_tool_calls_in_question": average([pstdev(len(row.pattern) for row in group) for group in pairs]),
        f"{name}_in_question": inside,
        name: overall,
    }


def measure_text_spreads(
    groups: Sequence[Sequence[str]], embedding_model: str | None
) -> tuple[float | None, float | None]:
    """The mean spread of the texts of one question, and the spread of all texts; None without two of them."""
    embedded_ND = None
    if embedding_model is not None:
        embedded_ND = embed_texts([text for group in groups for text in group], embedding_model)
    spreads, sums, start = [], [], 0
    for group in groups:
        end = start + len(group)
        units = normalize(count_word_pairs(group) if embedded_ND is None else embedded_ND[start:end])
        sums.append((units.sum(axis=0), float((units * units).sum()), len(group)))
        spreads.append(compute_spread(*sums[-1]))
        start = end
    known = [spread for spread in spreads if spread is not None]
    if not sums:
        return None, None
    total_D = np.sum([each for each, _, _ in sums], axis=0)
    return average(known), compute_spread(total_D, sum(each for _, each, _ in sums), sum(each for _, _, each in sums))


def average(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def normalize(vectors_ND: Floats) -> Floats:
    """Vectors of length 1; zero vectors stay."""
    norms_N1 = np.linalg.norm(vectors_ND, axis=1, keepdims=True)
    return np.asarray(vectors_ND / np.where(norms_N1 > 0, norms_N1, 1.0))


def compute_spread(total_D: Floats, squares: float, count: int) -> float | None:
    """Mean cosine distance over all pairs of `count` unit vectors with this sum and this sum of squares; None without a
    pair."""
    if count < 2:
        return None
    return 1.0 - (float(total_D @ total_D) - squares) / (count * (count - 1))


def count_word_pairs(texts: Sequence[str]) -> Floats:
    """Counts of pairs of neighboring words, in lower case, hashed to a fixed number of dimensions."""
    vectors_ND = np.zeros((len(texts), NUM_BUCKETS))
    for number, text in enumerate(texts):
        words = ["", *WORD.findall(text.lower()), ""]
        for one, other in pairwise(words):
            vectors_ND[number, zlib.crc32(f"{one} {other}".encode()) % NUM_BUCKETS] += 1
    return vectors_ND


def check_embedding_model(name: str | None) -> None:
    """Raise when an embedding model is wanted and its package is not installed."""
    if name is not None and importlib.util.find_spec("sentence_transformers") is None:
        raise ConfigError(
            f"embedding_model={name!r} needs sentence-transformers: pip install 'tunesmith[embeddings]', or leave "
            "embedding_model out to report the spread of word pairs"
        )


def embed_texts(texts: Sequence[str], name: str) -> Floats:
    """Embeddings of a sentence-transformers model."""
    check_embedding_model(name)
    from sentence_transformers import SentenceTransformer  # optional, and slow to import

    model = SentenceTransformer(name)
    return np.asarray(model.encode(list(texts), batch_size=BATCH_SIZE, show_progress_bar=False), dtype=np.float64)


def format_diversity(before: Mapping[str, float | None], after: Mapping[str, float | None]) -> list[list[str]]:
    """Rows of a table: measure, before, after."""

    def show(value: float | None) -> str:
        if value is None:
            return "-"
        return f"{value:.0f}" if value == math.floor(value) and value >= 10 else f"{value:.4g}"

    return [[name.replace("_", " "), show(before[name]), show(after[name])] for name in before]
