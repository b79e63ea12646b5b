"""Style scores, independent of correctness: format, reasoning, conciseness.

Each score is from 0 to 1, conciseness from -0.5. To resist reward hacking, empty tags, repeated lines, text copied from
the question, and tool calls that compute nothing or whose result is not used do not count.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Any

from tunesmith.judges.numeric import NUMBER, parse_number
from tunesmith.judges.transcript import MARKUP, ToolCallRecord, Transcript

ANSWER_LINE = re.compile(r"####[ ]*\$?-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
WORD = re.compile(r"[^\W\d_]+")
TOKEN = re.compile(r"\w+")
STEP_END = re.compile(r"\n|(?<=[.!?;])\s")
OPERATION = re.compile(r"(?<=[\d.)])\s*[-+*/\u00d7\u00f7x]\s*(?=[-$(]*[\d.])")
TERM = re.compile(r"(?<![\d.])[\d.]+\s*[-+*/\u00d7\u00f7x]\s*[$(]*[\d.]+")
NEUTRAL = re.compile(
    r"(?<![\d.])1(?:\.0*)?\s*\*\s*(?=[\d(])|(?<=[\d)])\s*(?:\*\*|[*/])\s*1(?:\.0*)?(?![\d.])"
    r"|(?<![\d.])0\s*\+\s*(?=[\d(])|(?<=[\d)])\s*[-+]\s*0(?:\.0*)?(?![\d.])"
)
"""Operations that do not change a value: multiplying or dividing by one, raising to the power one, adding or
subtracting zero."""
EQUATION = re.compile(r"(?<=[\d)%])\s{0,3}=\s{0,3}\$?-?[\d.]")
MAX_TERM_CHARACTERS = 60
"""Number of characters before an equals sign that are searched for an operation."""

MIN_REASONING_CHARACTERS = 20
MIN_REASONING_WORDS = 4
MIN_STEPS = 2
COPY_WORDS = 8
"""Steps of at least this many words that occur in the question count as copied."""
SHORT_WORDS, LONG_WORDS = 300, 800
USED_TOLERANCE = 0.01
"""A result counts as used if a later number is within this relative distance."""


def score_format(task: Mapping[str, Any], transcript: Transcript) -> float:
    """0.5 for reasoning inside its tags, 0.5 for ending with exactly one line `#### <number>`.

    Reasoning without substance scores 0.25 instead of 0.5. Stray tags in reasoning or content score 0 in total.
    """
    if any(MARKUP.search(part) for reply in transcript.replies for part in (reply.reasoning, reply.content)):
        return 0.0
    score = 0.0
    if transcript.reasoning:
        question = str(task.get("question", ""))
        score += 0.5 if has_substance(transcript.reasoning, question=question) else 0.25
    lines = transcript.answer.split("\n")
    if ANSWER_LINE.fullmatch(lines[-1].strip()) and transcript.answer.count("####") == 1:
        score += 0.5
    return score


def score_reasoning(task: Mapping[str, Any], transcript: Transcript) -> float:
    """0.5 for two steps of reasoning, plus 0.5 times the share of useful tool calls; 0 without reasoning.

    Without tool calls, an equation in the reasoning counts as a share of 1.
    """
    num_steps = count_steps(transcript.reasoning, question=str(task.get("question", "")))
    calculating = compute_useful_share(transcript)
    if calculating is None:
        calculating = float(has_equation(transcript.reasoning))
    return 0.5 * min(num_steps / MIN_STEPS, 1.0) + 0.5 * calculating * bool(transcript.reasoning)


def score_conciseness(task: Mapping[str, Any], transcript: Transcript) -> float:
    """1 for at most 300 words in all replies, 0 up to 800, -0.5 above; 0 without an answer."""
    if transcript.num_words > LONG_WORDS:
        return -0.5
    return float(bool(transcript.answer) and transcript.num_words <= SHORT_WORDS)


def has_substance(reasoning: str, *, question: str) -> bool:
    """Whether reasoning not copied from the question has 20 characters and 4 different words or terms."""
    original = "\n".join(list_original_pieces(reasoning, question=question))
    words = {word.casefold() for word in WORD.findall(original)} | set(TERM.findall(original))
    return len(original) >= MIN_REASONING_CHARACTERS and len(words) >= MIN_REASONING_WORDS


def count_steps(reasoning: str, *, question: str) -> int:
    """Number of different lines and sentences, not copied from the question, with two words or a term."""
    steps = set()
    for piece in list_original_pieces(reasoning, question=question):
        text = " ".join(TOKEN.findall(piece.casefold()))
        if len(set(WORD.findall(text))) >= 2 or TERM.search(piece):
            steps.add(text)
    return len(steps)


@functools.lru_cache(maxsize=1)  # several parts of a reward use the same pieces
def list_original_pieces(reasoning: str, *, question: str) -> tuple[str, ...]:
    """Lines and sentences without those copied from the question, also if a copy is split over consecutive pieces."""
    question_tokens = f" {' '.join(TOKEN.findall(question.casefold()))} "
    pieces = [piece.strip() for piece in STEP_END.split(reasoning) if TOKEN.search(piece)]
    words = [TOKEN.findall(piece.casefold()) for piece in pieces]
    original, start = [], 0
    while start < len(pieces):
        copied: list[str] = []
        end = start
        while end < len(pieces) and f" {' '.join(copied + words[end])} " in question_tokens:
            copied += words[end]
            end += 1
        if len(copied) >= COPY_WORDS:
            start = end
            continue
        original.append(pieces[start])
        start += 1
    return tuple(original)


def has_equation(reasoning: str) -> bool:
    """Whether an operation precedes an equals sign on the same line."""
    for found in EQUATION.finditer(reasoning):
        before = reasoning[max(0, found.start() - MAX_TERM_CHARACTERS) : found.start()]
        if is_operation(re.split(r"[=\n]", before)[-1]):
            return True
    return False


def compute_useful_share(transcript: Transcript) -> float | None:
    """Share of tool calls that compute something new, succeed, and whose result occurs in a later reply.

    None without tool calls. A call in the last reply has no later reply, so its result is not used.
    """
    calls = transcript.calls
    if not calls:
        return None
    seen: set[str] = set()
    num_useful = 0
    texts = (reply.text.replace("\\n", "\n") for reply in transcript.replies)
    found = (map(_parse_exact, NUMBER.findall(text)) for text in texts)
    numbers = [{number for number in each if number is not None} for each in found]
    for index, reply in enumerate(transcript.replies):
        later: set[Fraction | int] = set().union(*numbers[index + 1 :])
        for call in reply.calls:
            key = "".join(call.arguments.split())
            num_useful += key not in seen and is_operation(call.arguments) and is_used(call, later)
            seen.add(key)
    return num_useful / len(calls)


def is_operation(expression: str) -> bool:
    """Whether an expression has an operation that can change a value."""
    return OPERATION.search(NEUTRAL.sub("", expression)) is not None


def is_used(call: ToolCallRecord, later: Collection[Fraction | int]) -> bool:
    """Whether the result of a call is a number that occurs in `later`."""
    result = _parse_exact(call.result or "")
    if result is None or not later:
        return False
    limit = USED_TOLERANCE * float(min(abs(Fraction(result)), Fraction(sys.float_info.max)))
    return any(-limit <= number - result <= limit for number in later)


def _parse_exact(text: str) -> Fraction | int | None:
    """The value of a text that is one number; whole numbers as int, which compares faster than Fraction."""
    number = parse_number(text)
    return number.numerator if number is not None and number.denominator == 1 else number
