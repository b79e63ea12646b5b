"""Whether the final answer is right: several ways of comparing it with `task["answer"]`, each from 0 to 1.

One candidate is read from the last reply's content; reasoning, tool results and earlier replies say nothing. None says
that the reference holds nothing to compare with, so that there is no verdict.
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
    """1.0 for the number or the expression of the reference: numbers compare exactly, the rest by math-verify."""
    return score_numeric(transcript.answer, read_reference(task))


def match_symbolic(task: Mapping[str, Any], transcript: Transcript) -> float | None:
    """1.0 when math-verify finds answer and reference equal, numbers too."""
    return score_symbolic(transcript.answer, read_reference(task))


def build_tolerant_match(tolerance: float) -> Callable[[Mapping[str, Any], Transcript], float | None]:
    """1.0 for a number that is off by less than `tolerance` times the reference; no number is within none of zero."""
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
    """1.0 for the words of a reference, whatever case, punctuation and articles."""
    references = list_references(task)
    answer = normalise(read_stated(transcript.answer))
    return max((float(answer == normalise(reference)) for reference in references), default=None)


def score_f1(task: Mapping[str, Any], transcript: Transcript) -> float | None:
    """Harmonic mean of precision and recall of the answer's words (Rajpurkar et al., 2016, arXiv:1606.05250).

    The best over the references; the words are counted, so that repeating one gains nothing.
    """
    answer = normalise(read_stated(transcript.answer)).split()
    return max((_compute_f1(answer, normalise(reference).split()) for reference in list_references(task)), default=None)


def list_references(task: Mapping[str, Any]) -> list[str]:
    """The answers that count as right: `task["answer"]`, a text or several; those without a word are left out."""
    answer = task["answer"]
    given = answer if isinstance(answer, Sequence) and not isinstance(answer, str) else [answer]
    texts = [extract_marked(str(each)) or str(each) for each in given if each is not None]
    return [text for text in texts if normalise(text)]


def read_stated(text: str) -> str:
    r"""What stands in `\boxed{}` or after `####`, else after the last "answer is", else the whole text."""
    marked = extract_marked(text)
    if marked is not None:
        return marked
    statements = list(STATED.finditer(text))
    return statements[-1]["answer"] if statements else text


def normalise(text: str) -> str:
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
