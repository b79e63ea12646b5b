"""Operators on tasks, applied once before a run: they filter, score or reorder tasks and return metrics.

An operator is a function `(tasks, **args) -> (tasks, metrics)`. A task keeps its index and id, so that it can be found
in the data set; an operator adds fields to a row but never overwrites one.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt

from tunesmith.errors import DataError
from tunesmith.tasks.load import describe_missing_field
from tunesmith.types import Task

TaskOperator = Callable[..., tuple[list[Task], dict[str, float]]]

Fields = Annotated[list[str], Field(min_length=1)]
Weights = Annotated[dict[str, float], Field(min_length=1)]

WORD = re.compile(r"\w+")
TOKEN = re.compile(r"\w+(?:[.,]\w+)*|[^\w\s.,;:?'\"]")
"""Tokens that distinguish two tasks: words, numbers with decimals, and operator signs such as + - * / ( )."""
NGRAM_CHARS = 10
NGRAM_WORDS = 5
"""Lengths of the n-grams whose repetition is measured."""


def deduplicate(tasks: Sequence[Task], *, fields: Fields) -> tuple[list[Task], dict[str, float]]:
    """Keep the first of tasks whose fields are equal up to spacing, case and sentence punctuation."""
    seen: set[tuple[str, ...]] = set()
    kept = []
    for task in tasks:
        key = tuple(normalize(read_text(task, field)) for field in fields)
        if key not in seen:
            seen.add(key)
            kept.append(task)
    return kept, {"num_removed": float(len(tasks) - len(kept))}


def normalize(text: str) -> str:
    """The text without case, extra spacing and sentence punctuation."""
    return " ".join(TOKEN.findall(text.casefold()))


def length_filter(
    tasks: Sequence[Task], *, field: str, min_chars: NonNegativeInt = 0, max_chars: PositiveInt | None = None
) -> tuple[list[Task], dict[str, float]]:
    """Keep tasks whose field has between `min_chars` and `max_chars` characters."""

    def is_kept(task: Task) -> bool:
        length = len(read_text(task, field))
        return min_chars <= length and (max_chars is None or length <= max_chars)

    kept = [task for task in tasks if is_kept(task)]
    return kept, {"num_removed": float(len(tasks) - len(kept))}


def score_quality(
    tasks: Sequence[Task], *, field: str, to: str = "quality_score"
) -> tuple[list[Task], dict[str, float]]:
    """Add a score from 0 to 1: the mean share of alphanumeric characters and of unique character and word n-grams."""
    return _add_scores(tasks, to, [compute_quality(read_text(task, field)) for task in tasks])


def score_difficulty(
    tasks: Sequence[Task], *, feature_keys: Fields, to: str = "difficulty_score"
) -> tuple[list[Task], dict[str, float]]:
    """Add one minus the mean pass rate of the reference models."""
    scores = [1.0 - fmean(read_pass_rate(task, key) for key in feature_keys) for task in tasks]
    return _add_scores(tasks, to, scores)


def order_by_priority(
    tasks: Sequence[Task],
    *,
    weights: Annotated[dict[str, float], Field(min_length=1)],
    top_k: PositiveInt | None = None,
) -> tuple[list[Task], dict[str, float]]:
    """Sort by a weighted sum of numeric fields, highest first, stable; keep the first `top_k`."""

    def compute_priority(task: Task) -> float:
        return sum(weight * read_number(task, field) for field, weight in weights.items())

    kept = sorted(tasks, key=compute_priority, reverse=True)[:top_k]
    return kept, {"num_removed": float(len(tasks) - len(kept))}


def compute_quality(text: str) -> float:
    """Mean of three shares, each 1 for clean prose; 0 for text without words."""
    words = WORD.findall(text.casefold())
    if not words:
        return 0.0
    char_ngrams = [text[start : start + NGRAM_CHARS] for start in range(max(len(text) - NGRAM_CHARS + 1, 1))]
    word_ngrams = [tuple(words[start : start + NGRAM_WORDS]) for start in range(max(len(words) - NGRAM_WORDS + 1, 1))]
    alphanumeric = fmean(character.isalnum() for character in text if not character.isspace())
    return fmean([alphanumeric, compute_unique_share(char_ngrams), compute_unique_share(word_ngrams)])


def compute_unique_share(items: Sequence[Any]) -> float:
    """Share of the items that occur exactly once."""
    counts = Counter(items)
    return sum(count for count in counts.values() if count == 1) / len(items)


def read_text(task: Task, field: str) -> str:
    value = _read(task.row, field, task)
    return value if isinstance(value, str) else str(value)


def read_number(task: Task, field: str) -> float:
    value = _read(task.row, field, task)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"task {task.task_id} has {field}={value!r}, which is not a number")
    if not math.isfinite(value):
        raise DataError(f"task {task.task_id} has {field}={value!r}, which is not a finite number")
    return float(value)


def read_pass_rate(task: Task, field: str) -> float:
    value = read_number(task, field)
    if not 0 <= value <= 1:
        raise DataError(f"task {task.task_id} has {field}={value!r}, which is not a pass rate from 0 to 1")
    return value


def _read(row: Mapping[str, Any], field: str, task: Task) -> Any:
    if row.get(field) is None:
        raise DataError(f"task {task.task_id} {describe_missing_field(row, field)}")
    return row[field]


def _add_scores(tasks: Sequence[Task], to: str, scores: Sequence[float]) -> tuple[list[Task], dict[str, float]]:
    if any(to in task.row for task in tasks):
        raise DataError(f"the tasks already have a field {to!r}; choose another name with `to`")
    scored = [replace(task, row={**task.row, to: score}) for task, score in zip(tasks, scores, strict=True)]
    return scored, {"mean": fmean(scores), "min": min(scores), "max": max(scores)}
