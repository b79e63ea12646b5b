r"""Exact match and token F1 as in SQuAD's evaluation script (Rajpurkar et al., 2016, arXiv:1606.05250).

Texts are compared in lower case, without ASCII punctuation and the articles a, an, the. F1 has HotpotQA's rule: yes, no
and noanswer match only themselves. One thing differs from the script: a text of articles and punctuation alone, such as
the answer "A", is compared as it is, so that an empty prediction matches nothing. Numbers are compared as text.

The prediction is the last `<answer>` of the final answer, there or elsewhere its last `\boxed{}`, else what
`read_stated` finds. Text in `<result>`, where an environment writes, is no part of the answer.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tunesmith.judges.numeric import extract_marked
from tunesmith.judges.transcript import Transcript

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
RESULT = re.compile(r"<result>.*?(?:</result>|\Z)", re.DOTALL)
ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
STATED = re.compile(r"\banswer\s*(?:is(?:\s*:)?|:)\s*(?P<answer>[^\n]+)", re.IGNORECASE)
TEXT_COMMAND = re.compile(r"\\text\{([^{}]*)\}")


def score_exact_match(task: Mapping[str, Any], transcript: Transcript) -> float | None:
    """1.0 if the answer equals one of the accepted answers; None if the task has none."""
    accepted = list_accepted(task)
    return compute_exact_match(read_prediction(transcript.answer), accepted) if accepted else None


def score_token_f1(task: Mapping[str, Any], transcript: Transcript) -> float | None:
    """F1 of the answer's tokens with the best of the accepted answers; None if the task has none."""
    accepted = list_accepted(task)
    return compute_token_f1(read_prediction(transcript.answer), accepted) if accepted else None


def compute_exact_match(prediction: str, accepted: Sequence[str]) -> float:
    """1.0 if the normalized prediction equals a normalized accepted answer, else 0.0."""
    normalized = normalize(prediction)
    return float(any(normalized and normalized == normalize(each) for each in accepted))


def compute_token_f1(prediction: str, accepted: Sequence[str]) -> float:
    """The largest F1 of the prediction's tokens with those of an accepted answer, 0.0 without accepted answers."""
    return max((_compute_f1(normalize(prediction), normalize(each)) for each in accepted), default=0.0)


def normalize(text: str) -> str:
    """Lower case, without punctuation and articles, one space between tokens."""
    lowered = text.lower()
    bare = " ".join(ARTICLES.sub(" ", lowered.translate(PUNCTUATION)).split())
    return bare or " ".join(lowered.split())


def read_prediction(text: str) -> str:
    r"""The answer that a final answer states; a `\text{}` around it is removed."""
    written = RESULT.sub("", text)
    answers = ANSWER.findall(written)
    stated = read_stated(answers[-1] if answers else written).strip()
    unwrapped = TEXT_COMMAND.fullmatch(stated)
    return unwrapped[1].strip() if unwrapped else stated


def read_stated(text: str) -> str:
    r"""The text in `\boxed{}` or after `####`, else after the last "answer is", else the whole text."""
    marked = extract_marked(text)
    if marked is not None:
        return marked
    statements = list(STATED.finditer(text))
    return statements[-1]["answer"] if statements else text


def list_accepted(task: Mapping[str, Any]) -> list[str]:
    """The accepted answers: `task["answer"]`, one or a list; nulls and texts that state nothing are skipped."""
    answer = task["answer"]
    answers = answer if isinstance(answer, Sequence) and not isinstance(answer, str) else [answer]
    texts = [read_prediction(str(each)) for each in answers if each is not None]
    return [text for text in texts if normalize(text)]


def compute_overlap(prediction: str, accepted: str) -> float:
    """Harmonic mean of precision and recall of the tokens, as multisets, so repeating a token gains nothing."""
    found, expected = prediction.split(), accepted.split()
    num_common = sum((Counter(found) & Counter(expected)).values())
    if num_common == 0:
        return 0.0
    precision, recall = num_common / len(found), num_common / len(expected)
    return 2 * precision * recall / (precision + recall)


def _compute_f1(prediction: str, accepted: str) -> float:
    if prediction != accepted and not CLOSED_ANSWERS.isdisjoint((prediction, accepted)):
        return 0.0
    return compute_overlap(prediction, accepted)
