"""Contamination check: finds training texts that overlap with evaluation texts.

A training text is contaminated when it has the same words as an evaluation text, or shares an n-gram of `ngram_words`
words with one, ignoring case, spacing and punctuation. An evaluation text with fewer words counts as one n-gram.
`count_shared_tasks` compares whole rows, as they are.
"""

from __future__ import annotations

import re
from collections import defaultdict
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
        if words in eval_texts:
            found = Overlap(train_index=train_index, eval_index=eval_texts[words], kind="exact", words=" ".join(words))
            overlaps.append(found)
            continue
        grams = (gram for length in lengths for gram in iter_ngrams(words, length))
        shared = next((gram for gram in grams if gram in eval_ngrams), None)
        if shared is not None:
            eval_index = eval_ngrams[shared]
            found = Overlap(train_index=train_index, eval_index=eval_index, kind="ngram", words=" ".join(shared))
            overlaps.append(found)
    return overlaps


def split_words(text: str) -> tuple[str, ...]:
    """Words and numbers in lower case."""
    return tuple(WORD.findall(text.casefold()))


def iter_ngrams(words: Sequence[str], length: int) -> Iterator[tuple[str, ...]]:
    """All n-grams of `length` words; none when there are fewer words."""
    for start in range(len(words) - length + 1):
        yield tuple(words[start : start + length])


def count_shared_tasks(train: Sequence[Task], held_out: Sequence[Task]) -> int:
    """The number of held-out tasks whose row a training task has, with the same value in each field.

    Fields that only the training task has, such as a pass rate, do not matter.
    """
    by_text: defaultdict[str, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, task in enumerate(held_out):
        texts = [(len(value), field) for field, value in task.row.items() if isinstance(value, str)]
        if texts:
            field = max(texts)[1]
            by_text[field][task.row[field]].append(place)
    shared: set[int] = set()
    for task in train:
        for field, places_of in by_text.items():
            text = task.row.get(field)
            if isinstance(text, str) and text in places_of:
                shared.update(place for place in places_of[text] if is_part(held_out[place].row, task.row))
    return len(shared)


def is_part(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether another row has all fields of a row, with equal values."""
    return all(field in other and other[field] == value for field, value in row.items())
