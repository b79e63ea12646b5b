"""Scores of the final answer: functions that compare it with `task["answer"]`, each from 0 to 1.

One candidate is extracted from the content of the last reply; reasoning, tool results and earlier replies are ignored.
A score of None means that the reference contains no answer to compare with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from tunesmith.judges import squad
from tunesmith.judges.numeric import (
    extract_answer,
    extract_marked,
    has_formula,
    normalize_formula,
    parse_number,
    read_reference,
    score_numeric,
    score_symbolic,
)
from tunesmith.judges.transcript import Transcript


def match_numeric(task: Mapping[str, Any], transcript: Transcript) -> float | None:
    """1.0 if the answer equals the reference: numbers are compared exactly, other expressions by math-verify."""
    return score_numeric(transcript.answer, read_reference(task))


def match_symbolic(task: Mapping[str, Any], transcript: Transcript) -> float | None:
    """1.0 if math-verify finds answer and reference equal, for numbers too."""
    return score_symbolic(transcript.answer, read_reference(task))


def build_tolerant_match(tolerance: float) -> Callable[[Mapping[str, Any], Transcript], float | None]:
    r"""A score of 1.0 for a relative error below `tolerance`; for a reference of zero, only zero matches.

    Answers other than plain numbers, such as `\frac{1}{2}`, match as in `match_numeric`.
    """
    limit = Fraction(str(tolerance))

    def match_within_tolerance(task: Mapping[str, Any], transcript: Transcript) -> float | None:
        stated = read_reference(task)
        reference = parse_number(extract_marked(stated) or stated)
        candidate = parse_number(extract_answer(transcript.answer) or "")
        if reference is None or candidate is None:
            return match_numeric(task, transcript)
        return float(candidate == reference or abs(candidate - reference) < limit * abs(reference))

    return match_within_tolerance


def match_exact(task: Mapping[str, Any], transcript: Transcript) -> float | None:
    """1.0 if the answer has the words of a reference, ignoring case, punctuation and articles; numbers are compared by
    value, and formulas and lists with their operators."""
    answer = normalize(squad.read_prediction(transcript.answer))
    return max((float(answer == normalize(each)) for each in squad.list_accepted(task)), default=None)


def score_f1(task: Mapping[str, Any], transcript: Transcript) -> float | None:
    """F1 of the answer's words with the best reference, normalized as for `match_exact`."""
    answer = normalize(squad.read_prediction(transcript.answer))
    return max((squad.compute_overlap(answer, normalize(each)) for each in squad.list_accepted(task)), default=None)


def normalize(text: str) -> str:
    number = parse_number(text)
    with contextlib.suppress(ValueError):  # it has more digits than Python writes
        if number is not None:
            return str(number)
    return normalize_formula(text) if has_formula(text) else squad.normalize(text)
