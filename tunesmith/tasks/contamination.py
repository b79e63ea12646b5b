"""The gate between training and evaluation texts: what the evaluation asks must not have been trained on.

A training text is contaminated when it says the same as an evaluation text, or shares `ngram_words` words in a row
with one, whatever case, spacing and punctuation. An evaluation text of fewer words counts whole, wherever it stands in
a training text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """A training text that the evaluation set has, in whole or in part."""

    train_index: int
    eval_index: int
    kind: Literal["exact", "ngram"]
    words: str
    """The words that they share, or the whole text."""


def find_overlaps(train: Sequence[str], evaluation: Sequence[str], *, ngram_words: int) -> list[Overlap]:
    """At most one overlap for each training text, by its order; an exact one before one of n-grams."""
    whole: dict[tuple[str, ...], int] = {}
    parts: dict[tuple[str, ...], int] = {}
    for index, text in enumerate(evaluation):
        words = split_words(text)
        if words:
            whole.setdefault(words, index)
            for gram in iter_ngrams(words, min(ngram_words, len(words))):
                parts.setdefault(gram, index)
    lengths = sorted({len(gram) for gram in parts}, reverse=True)
    overlaps = []
    for train_index, text in enumerate(train):
        words = split_words(text)
        if words in whole:
            found = Overlap(train_index=train_index, eval_index=whole[words], kind="exact", words=" ".join(words))
            overlaps.append(found)
            continue
        grams = (gram for length in lengths for gram in iter_ngrams(words, length))
        shared = next((gram for gram in grams if gram in parts), None)
        if shared is not None:
            found = Overlap(train_index=train_index, eval_index=parts[shared], kind="ngram", words=" ".join(shared))
            overlaps.append(found)
    return overlaps


def split_words(text: str) -> tuple[str, ...]:
    """Words and numbers in lower case."""
    return tuple(WORD.findall(text.casefold()))


def iter_ngrams(words: Sequence[str], length: int) -> Iterator[tuple[str, ...]]:
    """All stretches of so many words; none when there are fewer."""
    for start in range(len(words) - length + 1):
        yield tuple(words[start : start + length])
