"""Scores of the final answer: functions that compare it with `task["answer"]`, each from 0 to 1.

One candidate is extracted from the content of the last reply; reasoning, tool results and earlier replies are ignored.
A score of None means that the reference contains no answer to compare with.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from tunesmith.judges.numeric import (
    extract_answer,
    extract_marked,
    parse_number,
    read_reference,
    score_numeric,
    score_symbolic,
)
from tunesmith.judges.transcript import Transcript

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
STATED = re.compile(r"\banswer\s*(?:is\s*:?|:)\s*(?P<answer>[^\n]+)", re.IGNORECASE)


def match_numeric(task: Mapping[str, Any], transcript: Transcript) -> float | None:
    """1.0 if the answer equals the reference: numbers are compared exactly, other expressions by math-verify."""
    return score_numeric(transcript.answer, read_reference(task))


def match_symbolic(task: Mapping[str, Any], transcript: Transcript) -> float | None:
    """1.0 if math-verify finds answer and reference equal, for numbers too."""
    return score_symbolic(transcript.answer, read_reference(task))


def build_tolerant_match(tolerance: float) -> Callable[[Mapping[str, Any], Transcript], float | None]:
    """A score of 1.0 for a relative error below `tolerance`; for a reference of zero, only zero matches."""
    limit = Fraction(str(tolerance))

    def match_within_tolerance(task: Mapping[str, Any], transcript: Transcript) -> float | None:
        stated = read_reference(task)
        reference = parse_number(extract_marked(stated) or stated)
        if reference is None:
            return match_numeric(task, transcript)
        candidate = parse_number(extract_answer(transcript.answer) or "")
        if candidate is None:
            return 0.0
        return float(candidate == reference or abs(candidate - reference) < limit * abs(reference))

    return match_within_tolerance


def match_exact(task: Mapping[str, Any], transcript: Transcript) -> float | None:
    """1.0 if the answer has the words of a reference, ignoring case, punctuation and articles."""
    references = list_references(task)
    answer = normalize(read_stated(transcript.answer))
    return max((float(answer == normalize(reference)) for reference in references), default=None)


def score_f1(task: Mapping[str, Any], transcript: Transcript) -> float | None:
    """F1 of the answer's words: harmonic mean of precision and recall (Rajpurkar et al., 2016, arXiv:1606.05250).

    Words are compared as multisets, so repeating a word gains nothing. The maximum over the references.
    """
    answer = normalize(read_stated(transcript.answer)).split()
    return max((_compute_f1(answer, normalize(reference).split()) for reference in list_references(task)), default=None)


def list_references(task: Mapping[str, Any]) -> list[str]:
    """The correct answers: `task["answer"]`, a text or a list of texts; those without words are skipped."""
    answer = task["answer"]
    answers = answer if isinstance(answer, Sequence) and not isinstance(answer, str) else [answer]
    texts = [extract_marked(str(each)) or str(each) for each in answers if each is not None]
    return [text for text in texts if normalize(text)]


def read_stated(text: str) -> str:
    r"""The text in `\boxed{}` or after `####`, else after the last "answer is", else the whole text."""
    marked = extract_marked(text)
    if marked is not None:
        return marked
    statements = list(STATED.finditer(text))
    return statements[-1]["answer"] if statements else text


def normalize(text: str) -> str:
    """Lower case, without punctuation and articles, one space between words."""
    number = parse_number(text)
    if number is not None:
        return str(number)
    return " ".join(ARTICLES.sub(" ", text.casefold().translate(PUNCTUATION)).split())


def _compute_f1(answer: Sequence[str], reference: Sequence[str]) -> float:
    num_common = sum((Counter(answer) & Counter(reference)).values())
    if num_common == 0:
        return 0.0
    precision, recall = num_common / len(answer), num_common / len(reference)
    return 2 * precision * recall / (precision + recall)
