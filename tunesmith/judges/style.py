"""How an answer is given, apart from whether it is right: its form, its reasoning, its length.

Each part is from 0 to 1, conciseness from -0.5, and is hard to get by going through the motions: tags without content,
the same line again, the question again, calls that compute nothing or whose result is not used count as nothing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Any

from tunesmith.chat.memo import memoize
from tunesmith.judges.numeric import NUMBER, parse_number
from tunesmith.judges.transcript import MARKUP, Call, Transcript

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
"""Operations that change nothing: times one, over one, plus nothing."""
EQUATION = re.compile(r"(?<=[\d)%])\s{0,3}=\s{0,3}\$?-?[\d.]")
MAX_TERM_CHARACTERS = 60
"""Before an equals sign, where an operation is looked for."""

MIN_REASONING_CHARACTERS = 20
MIN_REASONING_WORDS = 4
MIN_STEPS = 2
COPY_WORDS = 8
"""A step of so many words that stands in the question was copied from it."""
SHORT_WORDS, LONG_WORDS = 300, 800
NUM_KNOWN_QUESTIONS, MAX_QUESTION_CHARACTERS = 512, 4096
"""Questions whose words are remembered, and how long they may be; a group asks the same one."""
NUM_KNOWN_NUMBERS, MAX_NUMBER_CHARACTERS = 4096, 32
"""Texts of numbers whose values are remembered, and how long they may be."""
USED_TOLERANCE = 0.01
"""A result is used where a number as near as this, relative to it, is written later."""


def score_format(task: Mapping[str, Any], transcript: Transcript) -> float:
    """Half for reasoning in its tags, half for ending on one line `#### <number>` and nothing after it.

    Reasoning of a few letters gives half of its half. Tags that belong to nothing in what is said give 0.
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
    """Half for two steps of reasoning, half for calculating: the share of the calls that do something.

    Without any call, an equation in the reasoning counts as calculating.
    """
    num_steps = count_steps(transcript.reasoning, question=str(task.get("question", "")))
    calculating = compute_useful_share(transcript)
    if calculating is None:
        calculating = float(has_equation(transcript.reasoning))
    return 0.5 * min(num_steps / MIN_STEPS, 1.0) + 0.5 * calculating * bool(transcript.reasoning)


def score_conciseness(task: Mapping[str, Any], transcript: Transcript) -> float:
    """1 for at most 300 words in all replies, 0 to 800, -0.5 for more; silence is not concise."""
    if transcript.num_words > LONG_WORDS:
        return -0.5
    return float(bool(transcript.answer) and transcript.num_words <= SHORT_WORDS)


def has_substance(reasoning: str, *, question: str) -> bool:
    """More than some letters, or than the question: four different words and terms, and twenty characters."""
    own = "\n".join(list_own_pieces(reasoning, question=question))
    said = {word.casefold() for word in WORD.findall(own)} | set(TERM.findall(own))
    return len(own) >= MIN_REASONING_CHARACTERS and len(said) >= MIN_REASONING_WORDS


def count_steps(reasoning: str, *, question: str) -> int:
    """Different lines and sentences of the model's own that hold two words or a term."""
    steps = set()
    for piece in list_own_pieces(reasoning, question=question):
        said = " ".join(TOKEN.findall(piece.casefold()))
        if len(set(WORD.findall(said))) >= 2 or TERM.search(piece):
            steps.add(said)
    return len(steps)


@functools.lru_cache(maxsize=1)  # the parts of a reward ask for the same pieces
def list_own_pieces(reasoning: str, *, question: str) -> tuple[str, ...]:
    """Lines and sentences, less what is copied from the question, in one piece or chopped into several in a row."""
    asked = _join_tokens(question)
    pieces = [piece.strip() for piece in STEP_END.split(reasoning)]
    words = [TOKEN.findall(piece.casefold()) for piece in pieces]
    own, start = [], 0
    while start < len(pieces):
        copied: list[str] = []
        end = start
        while end < len(pieces) and f" {' '.join(copied + words[end])} " in asked:
            copied += words[end]
            end += 1
        if len(copied) >= COPY_WORDS:
            start = end
            continue
        if words[start]:
            own.append(pieces[start])
        start += 1
    return tuple(own)


@memoize(max_entries=NUM_KNOWN_QUESTIONS, max_length=MAX_QUESTION_CHARACTERS)
def _join_tokens(question: str) -> str:
    return f" {' '.join(TOKEN.findall(question.casefold()))} "


def has_equation(reasoning: str) -> bool:
    """Whether something is computed before an equals sign, on the same line."""
    for found in EQUATION.finditer(reasoning):
        before = reasoning[max(0, found.start() - MAX_TERM_CHARACTERS) : found.start()]
        if is_operation(re.split(r"[=\n]", before)[-1]):
            return True
    return False


def compute_useful_share(transcript: Transcript) -> float | None:
    """Of the tool calls, the share that compute something new, succeed, and whose result is used later; None if none.

    A call that is alone with its run's only reply has no later; its result is used by nobody.
    """
    calls = transcript.calls
    if not calls:
        return None
    seen: set[str] = set()
    num_useful = 0
    numbers = [find_numbers(reply.text) for reply in transcript.replies]
    for index, reply in enumerate(transcript.replies):
        later: set[Fraction | int] = set().union(*numbers[index + 1 :])
        for call in reply.calls:
            key = "".join(call.arguments.split())
            num_useful += key not in seen and is_operation(call.arguments) and is_used(call, later)
            seen.add(key)
    return num_useful / len(calls)


def is_operation(expression: str) -> bool:
    """Whether something is computed in it: an operation on numbers that can change them."""
    return OPERATION.search(NEUTRAL.sub("", expression)) is not None


def is_used(call: Call, later: Collection[Fraction | int]) -> bool:
    """Whether the result is a number that is written later."""
    result = _parse_exact(call.result or "")
    if result is None or not later:
        return False
    limit = USED_TOLERANCE * float(abs(result))
    return any(-limit <= number - result <= limit for number in later)


def find_numbers(text: str) -> set[Fraction | int]:
    """The numbers that are written in a text."""
    numbers = map(_parse_exact, NUMBER.findall(text.replace("\\n", "\n")))
    return {number for number in numbers if number is not None}


@memoize(max_entries=NUM_KNOWN_NUMBERS, max_length=MAX_NUMBER_CHARACTERS)
def _parse_exact(text: str) -> Fraction | int | None:
    """The value of a text that is one number; whole ones as integers, which compare fast."""
    number = parse_number(text)
    return number.numerator if number is not None and number.denominator == 1 else number
