"""Contamination check: finds training texts that overlap with evaluation texts.

A training text is contaminated when it has the same words as an evaluation text, or shares an n-gram of `ngram_words`
words with one, ignoring case, spacing and punctuation. An evaluation text with fewer words counts as one n-gram.
`count_shared_tasks` compares whole rows, as they are.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tunesmith.types import Task

WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """A training text that overlaps with an evaluation text."""

    train_index: int
    eval_index: int
    kind: Literal["exact", "ngram"]
    words: str
    """The shared n-gram, or the whole text if it is exact."""


def find_overlaps(train: Sequence[str], evaluation: Sequence[str], *, ngram_words: int) -> list[Overlap]:
    """At most one overlap per training text, in order; exact matches take precedence over n-grams."""
    eval_texts: dict[tuple[str, ...], int] = {}
    eval_ngrams: dict[tuple[str, ...], int] = {}
    for index, text in enumerate(evaluation):
        words = split_words(text)
        if words:
            eval_texts.setdefault(words, index)
            for gram in iter_ngrams(words, min(ngram_words, len(words))):
                eval_ngrams.setdefault(gram, index)
    lengths = sorted({len(gram) for gram in eval_ngrams}, reverse=True)
    overlaps = []
    for train_index, text in enumerate(train):
        words = split_words(text)
        kind: Literal["exact", "ngram"] = "exact" if words in eval_texts else "ngram"
        grams = (gram for length in lengths for gram in iter_ngrams(words, length))
        shared = words if kind == "exact" else next((gram for gram in grams if gram in eval_ngrams), None)
        if shared is not None:
            index = (eval_texts if kind == "exact" else eval_ngrams)[shared]
            overlaps.append(Overlap(train_index=train_index, eval_index=index, kind=kind, words=" ".join(shared)))
    return overlaps


def split_words(text: str) -> tuple[str, ...]:
    return tuple(WORD.findall(text.casefold()))


def iter_ngrams(words: Sequence[str], length: int) -> Iterator[tuple[str, ...]]:
    """All n-grams of `length` words; none when there are fewer words."""
    for start in range(len(words) - length + 1):
        yield tuple(words[start : start + length])


def count_shared_tasks(train: Sequence[Task], held_out: Sequence[Task]) -> int:
    """The number of held-out tasks whose row a training task has, with the same value in each field.

    Fields that only the training task has, such as a pass rate, do not matter. Rows without a text are not counted.
    """
    by_fields: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for task in held_out:
        if any(isinstance(value, str) for value in task.row.values()):
            fields = tuple(task.row)
            by_fields[fields][write_fields(task.row, fields)] += 1
    num_shared = 0
    for task in train:
        for fields, numbers in by_fields.items():
            if all(field in task.row for field in fields):
                num_shared += numbers.pop(write_fields(task.row, fields), 0)
    return num_shared


def write_fields(row: Mapping[str, Any], fields: Sequence[str]) -> str:
    """Values of a row, equal for equal values."""
    return json.dumps([row[field] for field in fields], sort_keys=True, default=str)
